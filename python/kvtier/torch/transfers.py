"""Moves chunks between the paged KV cache and the slots of the primary region.

A slot holds a chunk as `[tensor][block of the chunk][page_bytes]`, densely from its start,
whatever the device, so a chunk that a CPU run stored can be loaded by a GPU run. `TransferEngine`
checks every id before any byte moves and hands the work to the lane of the device:
`kvtier.torch.host_lane` for CPU tensors, `kvtier.torch.cuda_lane` for CUDA tensors.
"""

from __future__ import annotations

from types import TracebackType
from typing import Protocol, Self

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from kvtier._kvtier import Region
from kvtier.errors import ClosedError, TransferError
from kvtier.torch.kv_cache import KVCache

__all__ = ["TransferEngine", "TransferJob", "TransferLane", "region_tensor"]


def region_tensor(region: Region) -> torch.Tensor:
    """Returns the region as a uint8 tensor of shape `(slots, slot_bytes)`, without a copy.

    The tensor keeps the mapping alive.
    """
    return torch.frombuffer(region, dtype=torch.uint8).view(region.slots, region.slot_bytes)


class TransferJob(Protocol):
    """One batch of chunks on its way; `TransferEngine.wait` completes it."""

    @property
    def bytes(self) -> int:
        """Bytes that the job moves, padding of slots not counted."""

    @property
    def seconds(self) -> float:
        """Time the copy took, without the time it was queued; waits for the job."""

    def done(self) -> bool:
        """Whether every byte has arrived; never waits."""

    def wait(self) -> None:
        """Waits until every byte has arrived; raises what the copy raised."""


class TransferLane(Protocol):
    """The part of a transfer engine that depends on the device. Ids are checked already."""

    def submit(
        self, block_ids: NDArray[np.int64], slots: NDArray[np.uint32], *, to_slots: bool
    ) -> TransferJob:
        """Starts to copy blocks to slots (`to_slots`) or slots to blocks."""

    def close(self) -> None:
        """Waits for running copies and gives resources back. Idempotent."""


class TransferEngine:
    """Stores and loads whole chunks of one KV cache. Use as a context manager, or `close` it.

    Jobs of one engine run in the order they were submitted. The caller owns the slots
    (`Manager.prepare_store`, `Manager.prepare_load`) until the job was waited for, and must
    not reuse the blocks of a running store.
    """

    def __init__(self, region: Region, kv_cache: KVCache, blocks_per_chunk: int) -> None:
        """Opens the lane of the KV cache's device.

        Raises `TransferError` when a slot is too small for a chunk, or the device has no lane.
        """
        if blocks_per_chunk < 1:
            raise TransferError(f"blocks_per_chunk is {blocks_per_chunk}, but must be 1 or more")
        devices = sorted({str(tensor.device) for tensor in kv_cache.canonical})
        if len(devices) != 1:
            raise TransferError(f"the KV cache lies on more than one device: {', '.join(devices)}")
        self._blocks_per_chunk = blocks_per_chunk
        self._chunk_bytes = kv_cache.page_bytes * blocks_per_chunk
        if self._chunk_bytes > region.slot_bytes:
            raise TransferError(
                f"a chunk has {self._chunk_bytes} bytes, but a slot of the region has only "
                f"{region.slot_bytes}; make the region with slot_bytes={self._chunk_bytes}"
            )
        self._num_blocks = kv_cache.num_blocks
        self._slots = region.slots
        self._device = kv_cache.device
        self._closed = False
        self._lane = _make_lane(region, kv_cache, blocks_per_chunk)

    @property
    def chunk_bytes(self) -> int:
        """Bytes of one chunk of every layer."""
        return self._chunk_bytes

    @property
    def blocks_per_chunk(self) -> int:
        """Blocks of one chunk."""
        return self._blocks_per_chunk

    def store(self, block_ids: ArrayLike | torch.Tensor, slots: ArrayLike) -> TransferJob:
        """Starts to copy chunk `i`, the blocks `block_ids[i]`, into `slots[i]`.

        `block_ids` has shape `(chunks, blocks_per_chunk)`, `slots` `(chunks,)`. What the
        compute stream wrote before this call is what gets stored. Raises `TransferError`
        before any byte moves for a wrong shape or type, an id that does not exist, a slot
        given twice, or ids on another device than the host and the KV cache.
        """
        blocks, slot_ids = self._checked(block_ids, slots)
        _refuse_repeats("slot", slot_ids)
        return self._lane.submit(blocks, slot_ids, to_slots=True)

    def load(self, block_ids: ArrayLike | torch.Tensor, slots: ArrayLike) -> TransferJob:
        """Starts to copy `slots[i]` into the blocks `block_ids[i]`.

        On CUDA, work that the compute stream gets after this call sees the loaded blocks; on
        CPU, wait for the job first. Raises `TransferError` as `store` does, here for a
        destination block given twice.
        """
        blocks, slot_ids = self._checked(block_ids, slots)
        _refuse_repeats("destination block", blocks.reshape(-1))
        return self._lane.submit(blocks, slot_ids, to_slots=False)

    def wait(self, job: TransferJob) -> None:
        """Waits until `job` has moved its last byte; raises what the copy raised."""
        job.wait()

    def close(self) -> None:
        """Waits for running jobs; later transfers raise `ClosedError`. Idempotent."""
        self._closed = True
        self._lane.close()

    def __enter__(self) -> Self:
        """Returns the engine; `close` is called at the end of the block."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Closes the engine."""
        self.close()

    def _checked(
        self, block_ids: ArrayLike | torch.Tensor, slots: ArrayLike
    ) -> tuple[NDArray[np.int64], NDArray[np.uint32]]:
        if self._closed:
            raise ClosedError("the transfer engine is closed")
        blocks = self._integers("block_ids", block_ids)
        slot_ids = self._integers("slots", slots)
        if blocks.ndim != 2 or blocks.shape[1] != self._blocks_per_chunk:
            raise TransferError(
                f"block_ids must have the shape (chunks, {self._blocks_per_chunk}), "
                f"not {blocks.shape}"
            )
        if slot_ids.shape != (blocks.shape[0],):
            raise TransferError(
                f"{blocks.shape[0]} chunks need slots of the shape ({blocks.shape[0]},), "
                f"not {slot_ids.shape}"
            )
        _refuse_outside("block", blocks, self._num_blocks)
        _refuse_outside("slot", slot_ids, self._slots)
        return np.ascontiguousarray(blocks, np.int64), np.ascontiguousarray(slot_ids, np.uint32)

    def _integers(self, name: str, ids: ArrayLike | torch.Tensor) -> NDArray[np.integer]:
        if isinstance(ids, torch.Tensor):
            if ids.device.type != "cpu" and ids.device != self._device:
                raise TransferError(
                    f"{name} lies on {ids.device}, but the KV cache on {self._device}"
                )
            ids = ids.cpu().numpy()
        values = np.asarray(ids)
        if values.size == 0:
            values = values.astype(np.int64)
        if values.dtype.kind not in "iu":
            raise TransferError(f"{name} must be integers, not {values.dtype}")
        return values


def _refuse_outside(what: str, ids: NDArray[np.integer], count: int) -> None:
    if ids.size and (ids.min() < 0 or ids.max() >= count):
        bad = ids[(ids < 0) | (ids >= count)].flat[0]
        raise TransferError(f"{what} {bad} does not exist: there are {count}")


def _refuse_repeats(what: str, ids: NDArray[np.integer]) -> None:
    values, counts = np.unique(ids, return_counts=True)
    if values.size != ids.size:
        raise TransferError(f"{what} {values[counts > 1][0]} is given twice in one transfer")


def _make_lane(region: Region, kv_cache: KVCache, blocks_per_chunk: int) -> TransferLane:
    # Imported here: each lane needs what only its own kind of machine has.
    if kv_cache.device.type == "cpu":
        from kvtier.torch.host_lane import HostLane

        return HostLane(region, kv_cache.canonical, blocks_per_chunk)
    if kv_cache.device.type == "cuda":
        from kvtier.torch.cuda_lane import CudaLane

        return CudaLane(region_tensor(region), kv_cache.canonical, blocks_per_chunk)
    raise TransferError(f"KV caches on {kv_cache.device} are not supported: use cpu or cuda")
