"""Moves chunks between the paged KV cache and the slots of the primary region.

`TransferEngine` checks every id before any byte moves, orders jobs that touch the same blocks or
slots, and hands the work to the lanes of the device: `kvtier.torch.host_lanes` for CPU tensors,
`kvtier.torch.cuda_lanes` for CUDA tensors. Both write the same bytes, so a chunk that a CPU run
stored can be loaded by a GPU run; `kvtier.torch.chunk_layout` says which.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Protocol, Self, TypeVar

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from kvtier._kvtier import Moves, Region
from kvtier.errors import ClosedError, ForkError, TransferError
from kvtier.torch.canonical import CanonicalKVCaches
from kvtier.torch.chunk_layout import ChunkLayout, TensorParallel, chunk_layout
from kvtier.torch.kv_cache import KVCache
from kvtier.torch.ordering import Lane, Ordering
from kvtier.torch.transfer_trace import TransferTrace

__all__ = [
    "GroupBlocks",
    "LaneCopy",
    "TransferEngine",
    "TransferJob",
    "TransferLanes",
    "check_device",
    "region_tensor",
]


def region_tensor(region: Region) -> torch.Tensor:
    """Returns the region as a uint8 tensor of shape `(slots, slot_bytes)`, without a copy.

    The tensor keeps the mapping alive.
    """
    return torch.frombuffer(region, dtype=torch.uint8).view(region.slots, region.slot_bytes)


def check_device(device: torch.device) -> None:
    """Raises `TransferError` for a device that there are no lanes for."""
    if device.type not in ("cpu", "cuda"):
        raise TransferError(f"KV caches on {device} are not supported: use cpu or cuda")


@dataclass(frozen=True)
class GroupBlocks:
    """Consecutive blocks of one request in one group, and the slots of their chunks.

    Block `i` is at place `first + i`, counted over the chunks of `slots` one after the other. So
    the first chunk lacks its first `first` blocks, and the last one what is behind the last
    block. There are as many slots as chunks with a block in them.
    """

    block_ids: ArrayLike | torch.Tensor
    slots: ArrayLike
    group: int = 0
    first: int = 0


class LaneCopy(Protocol):
    """One job on its lane."""

    @property
    def began(self) -> float:
        """When the copy began, on the clock of `time.monotonic`; waits for it.

        To be asked of copies in the order they were submitted in.
        """

    @property
    def seconds(self) -> float:
        """Time the copy took, without the time it was queued; waits for it."""

    @property
    def error(self) -> BaseException | None:
        """What the copy raised, if it failed; waits for it."""

    def done(self) -> bool:
        """Whether the copy has ended; never waits."""

    def wait(self) -> None:
        """Waits for the copy; raises what it raised."""

    def before_compute(self) -> None:
        """Orders the copy before what the device computes next."""


_CopyT = TypeVar("_CopyT", bound=LaneCopy)


class TransferLanes(Protocol[_CopyT]):
    """The part of a transfer engine that depends on the device. Ids are checked already."""

    def submit(
        self, lane: Lane, parts: Sequence[tuple[int, Moves]], after: Sequence[_CopyT]
    ) -> _CopyT:
        """Queues `(group, moves)` pairs behind the lane's jobs, and behind `after`."""

    def close(self) -> None:
        """Waits for queued copies and gives resources back. Idempotent."""


class TransferJob:
    """One transfer on its way; made by `TransferEngine.store` and `load`."""

    def __init__(self, number: int, size: int, copy: LaneCopy, lane: Lane) -> None:
        """`number` counts the jobs of an engine from 1; `size` is in bytes."""
        self.number = number
        self.lane = lane
        self._size = size
        self._copy = copy

    @property
    def bytes(self) -> int:
        """Bytes that the job moves; of bytes that several ranks hold, this rank's turns."""
        return self._size

    @property
    def began(self) -> float:
        """When the copy began, on the clock of `time.monotonic`; waits for the job."""
        return self._copy.began

    @property
    def seconds(self) -> float:
        """Time the copy took, without the time it was queued; waits for the job."""
        return self._copy.seconds

    @property
    def error(self) -> BaseException | None:
        """What the copy raised, if it failed; waits for the job."""
        return self._copy.error

    def done(self) -> bool:
        """Whether the job has ended; never waits."""
        return self._copy.done()

    def wait(self) -> None:
        """Waits until every byte has arrived; raises what the copy raised."""
        self._copy.wait()

    def before_compute(self) -> None:
        """Makes work that the current stream of the device gets from now on see what was loaded.

        The host does not wait on CUDA; on CPU this is `wait`.
        """
        self._copy.before_compute()


class TransferEngine:
    """Stores and loads chunks of one KV cache. Use as a context manager, or `close` it.

    Jobs that touch the same blocks or slots take effect in the order they were submitted; others
    may overtake each other: stores, loads and expedited loads have a lane each. The caller owns
    the slots (`Manager.prepare_store`, `Manager.prepare_load`) until the job was waited for, and
    must not change the blocks of a running store. Calls come from one thread.
    """

    def __init__(
        self,
        region: Region,
        kv_cache: KVCache | CanonicalKVCaches | ChunkLayout | None,
        blocks_per_chunk: int,
        *,
        tensor_parallel: TensorParallel | None = None,
    ) -> None:
        """Registers `kv_cache`, or leaves that to a later `register` where it is None.

        With `tensor_parallel`, chunks have the parallel-agnostic order, and the region is shared
        by all ranks. Raises `TransferError` as `register` does.
        """
        if blocks_per_chunk < 1:
            raise TransferError(f"blocks_per_chunk is {blocks_per_chunk}, but must be 1 or more")
        self._region = region
        self._blocks_per_chunk = blocks_per_chunk
        self._tensor_parallel = tensor_parallel
        self._registered: _Registered | None = None
        self._closed = False
        self._pid = os.getpid()
        self._submitted = 0
        self._under_way: deque[TransferJob] = deque()
        self._unreported: dict[int, TransferJob] = {}
        self._trace = TransferTrace.open()
        if kv_cache is not None:
            self.register(kv_cache)

    def register(self, kv_cache: KVCache | CanonicalKVCaches | ChunkLayout) -> None:
        """Opens the lanes of the KV cache's device.

        A `ChunkLayout` is taken as it is; of the others, `chunk_layout` makes one. Raises
        `TransferError` when a cache is registered already, a slot is too small for a chunk, the
        device has no lanes, or a `ChunkLayout` is given to an engine with `tensor_parallel`;
        `LayoutError` when the tensor-parallel ranks can not hold the shards that a layer names.
        """
        self._check_open()
        if self._registered is not None:
            raise TransferError("a KV cache is registered already: an engine moves one")
        layout = self._layout_of(kv_cache)
        chunk_bytes = layout.block_bytes * self._blocks_per_chunk
        if chunk_bytes > self._region.slot_bytes:
            raise TransferError(
                f"a chunk has {chunk_bytes} bytes, but a slot of the region has only "
                f"{self._region.slot_bytes}; make the region with slot_bytes={chunk_bytes}"
            )
        lanes = _open_lanes(self._region, layout, self._blocks_per_chunk)
        ordering = Ordering(layout.num_blocks, self._region.slots)
        self._registered = _Registered(layout, lanes, ordering, chunk_bytes)

    def _layout_of(self, kv_cache: KVCache | CanonicalKVCaches | ChunkLayout) -> ChunkLayout:
        if isinstance(kv_cache, ChunkLayout):
            if self._tensor_parallel is not None:
                raise TransferError(
                    f"the engine has {self._tensor_parallel}, but a ChunkLayout says already what "
                    "each rank moves: leave tensor_parallel out"
                )
            return kv_cache
        caches = kv_cache.canonical if isinstance(kv_cache, KVCache) else kv_cache
        return chunk_layout(caches, self._tensor_parallel)

    @property
    def blocks_per_chunk(self) -> int:
        """Blocks of one chunk."""
        return self._blocks_per_chunk

    @property
    def lanes(self) -> TransferLanes[Any]:
        """What moves the bytes on this device, for figures about it."""
        return self._opened().lanes

    @property
    def chunk_bytes(self) -> int:
        """Bytes of one chunk of the widest group: what a slot must hold."""
        return self._opened().chunk_bytes

    def store(
        self,
        block_ids: ArrayLike | torch.Tensor,
        slots: ArrayLike,
        *,
        group: int = 0,
        first: int = 0,
    ) -> TransferJob:
        """Starts to copy blocks of one group into the slots of their chunks.

        The arguments are those of `GroupBlocks`; ids of whole chunks may have the shape
        `(chunks, blocks_per_chunk)`. What the compute stream wrote before this call is what gets
        stored. Raises `TransferError` before any byte moves for a wrong shape or type, an id or
        group that does not exist, a slot given twice, or ids on another device than the host and
        the KV cache; also when nothing is registered. `ClosedError` after `close`, `ForkError`
        after `fork`.
        """
        return self.store_groups([GroupBlocks(block_ids, slots, group, first)])

    def load(
        self,
        block_ids: ArrayLike | torch.Tensor,
        slots: ArrayLike,
        *,
        group: int = 0,
        first: int = 0,
        expedited: bool = False,
    ) -> TransferJob:
        """Starts to copy slots into blocks; see `store` for the arguments.

        The copy waits for what the compute stream has queued, since that may still write the
        destination. What computes next does not wait for it: call `wait`, or `before_compute` of
        the job. An expedited load does not queue behind other loads. Raises `TransferError` as
        `store` does, here for a block given twice.
        """
        return self.load_groups([GroupBlocks(block_ids, slots, group, first)], expedited=expedited)

    def store_groups(self, parts: Sequence[GroupBlocks]) -> TransferJob:
        """Stores blocks of several groups as one job; see `store`."""
        return self._submit(Lane.STORE, parts)

    def load_groups(self, parts: Sequence[GroupBlocks], *, expedited: bool = False) -> TransferJob:
        """Loads blocks of several groups as one job; see `load`."""
        return self._submit(Lane.EXPEDITED if expedited else Lane.LOAD, parts)

    def wait(self, job: TransferJob) -> None:
        """Waits until `job` has moved its last byte; raises what the copy raised."""
        self._unreported.pop(job.number, None)
        job.wait()

    def finished(self) -> list[TransferJob]:
        """The jobs that have ended, each once, without those that `wait` was called for.

        Never waits. A job that failed is among them, see `TransferJob.error`.
        """
        ended = [job for job in self._unreported.values() if job.done()]
        for job in ended:
            del self._unreported[job.number]
        return ended

    def close(self) -> None:
        """Waits for running jobs; later transfers raise `ClosedError`. Idempotent."""
        self._closed = True
        if self._registered is not None:
            self._registered.lanes.close()
        self._forget_ended()

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

    def _submit(self, lane: Lane, parts: Sequence[GroupBlocks]) -> TransferJob:
        opened = self._opened()
        moves = [self._checked(opened, part, to_slots=lane is Lane.STORE) for part in parts]
        _refuse_shared_destinations(moves, to_slots=lane is Lane.STORE)
        pairs = [(part.group, part_moves) for part, part_moves in zip(parts, moves, strict=True)]
        self._forget_ended()
        number = self._submitted = self._submitted + 1
        before = set(opened.ordering.add(number, lane, moves))
        after = [job._copy for job in self._under_way if job.number in before]
        copy = opened.lanes.submit(lane, pairs, after)
        size = sum(
            opened.layout.groups[group].moved_bytes(part_moves, self._blocks_per_chunk)
            for group, part_moves in pairs
        )
        job = TransferJob(number, size, copy, lane)
        self._under_way.append(job)
        self._unreported[number] = job
        return job

    def _forget_ended(self) -> None:
        ended = []
        while self._under_way and self._under_way[0].done():
            ended.append(self._under_way.popleft())
        if self._trace is not None:
            self._trace.ended(ended)

    def _checked(self, opened: _Registered, part: GroupBlocks, *, to_slots: bool) -> Moves:
        groups = len(opened.layout.groups)
        if not 0 <= part.group < groups:
            raise TransferError(f"group {part.group} does not exist: there are {groups}")
        if part.first < 0:
            raise TransferError(f"the first block is at place {part.first} of its chunk")
        blocks = _integers("block_ids", part.block_ids, opened.layout.device)
        if blocks.ndim == 2 and blocks.shape[1] != self._blocks_per_chunk:
            raise TransferError(
                f"block_ids must have the shape (blocks,) or (chunks, {self._blocks_per_chunk}), "
                f"not {blocks.shape}"
            )
        slots = _integers("slots", part.slots, opened.layout.device)
        if blocks.ndim not in (1, 2) or slots.ndim != 1:
            raise TransferError(
                f"block_ids must have one or two dimensions and slots one, not the shapes "
                f"{blocks.shape} and {slots.shape}"
            )
        return Moves(
            blocks.reshape(-1),
            slots,
            to_slots=to_slots,
            num_blocks=opened.layout.num_blocks,
            num_slots=self._region.slots,
            blocks_per_chunk=self._blocks_per_chunk,
            first=part.first,
        )

    def _opened(self) -> _Registered:
        self._check_open()
        if self._registered is None:
            raise TransferError("no KV cache is registered yet: call register first")
        return self._registered

    def _check_open(self) -> None:
        if os.getpid() != self._pid:
            raise ForkError(
                "this transfer engine was made before fork, and its threads are not here: start "
                'worker processes with multiprocessing\'s "spawn" method'
            )
        if self._closed:
            raise ClosedError("the transfer engine is closed")


@dataclass(frozen=True)
class _Registered:
    """What an engine has of its KV cache."""

    layout: ChunkLayout
    lanes: TransferLanes[Any]
    ordering: Ordering
    chunk_bytes: int


def _integers(name: str, ids: ArrayLike | torch.Tensor, device: torch.device) -> NDArray[np.int64]:
    if isinstance(ids, torch.Tensor):
        if ids.device.type != "cpu" and ids.device != device:
            raise TransferError(f"{name} lies on {ids.device}, but the KV cache on {device}")
        ids = ids.cpu().numpy()
    values = np.asarray(ids)
    if values.size == 0:
        values = values.astype(np.int64)
    if values.dtype.kind not in "iu":
        raise TransferError(f"{name} must be integers, not {values.dtype}")
    return np.ascontiguousarray(values, np.int64)


def _refuse_shared_destinations(parts: Sequence[Moves], *, to_slots: bool) -> None:
    """Parts are checked one by one already; groups lie over each other, so blocks are common."""
    seen: dict[int, int] = {}
    if len(parts) < 2:
        return
    for index, moves in enumerate(parts):
        for destination in set((moves.slots if to_slots else moves.block_ids).tolist()):
            if seen.setdefault(destination, index) != index:
                raise TransferError(
                    f"{'slot' if to_slots else 'block'} {destination} is a destination of two "
                    f"groups in one transfer"
                )


def _open_lanes(region: Region, layout: ChunkLayout, blocks_per_chunk: int) -> TransferLanes[Any]:
    check_device(layout.device)
    # Imported here: each kind of lanes needs what only its own kind of machine has.
    if layout.device.type == "cpu":
        from kvtier.torch.host_lanes import HostLanes

        return HostLanes(region, layout, blocks_per_chunk)
    from kvtier.torch.cuda_lanes import CudaLanes

    return CudaLanes(region_tensor(region), layout, blocks_per_chunk)
