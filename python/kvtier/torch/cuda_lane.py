"""Transfers of KV caches on a CUDA device, on a stream of their own.

Blocks are gathered on the device into one staging tensor, `(chunks, chunk_bytes)`, and every
chunk then crosses the bus as one copy. Order between the streams:

* a store waits for what the compute stream had queued when it was submitted;
* a load waits for that too, since pending work may still write its destination blocks, and
  the compute stream waits for the load.

The copies are only asynchronous when the region is registered with CUDA. Where that fails,
the lane warns once and goes on with pageable memory.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

__all__ = ["CudaJob", "CudaLane", "PinnedRegion"]

_REGISTER_PIECE_BYTES = 1 << 30
"""Drivers refuse or stall on very large registrations, so a region is registered in pieces."""


class PinnedRegion:
    """Registers host memory with CUDA for as long as it is open; reports what failed."""

    def __init__(self, rows: torch.Tensor) -> None:
        """Registers `rows`, contiguous host memory; warns and stays pageable on failure."""
        self._rows = rows  # keeps the mapping alive while the driver knows its address
        self._pieces: list[int] = []
        runtime = torch.cuda.cudart()
        total = rows.numel() * rows.element_size()
        for offset in range(0, total, _REGISTER_PIECE_BYTES):
            size = min(_REGISTER_PIECE_BYTES, total - offset)
            address = rows.data_ptr() + offset
            status = int(runtime.cudaHostRegister(address, size, 0))
            if status != 0:
                _clear_cuda_error()
                self.close()
                warnings.warn(
                    f"cudaHostRegister of {size} bytes failed with CUDA error {status}: "
                    f"transfers use pageable memory and are slower; raise the limit of locked "
                    f"memory (ulimit -l) or make the region smaller",
                    RuntimeWarning,
                    stacklevel=2,
                )
                return
            self._pieces.append(address)

    @property
    def pinned(self) -> bool:
        """Whether the whole region is registered."""
        return bool(self._pieces)

    def close(self) -> None:
        """Undoes the registration. Idempotent."""
        runtime = torch.cuda.cudart()
        while self._pieces:
            if int(runtime.cudaHostUnregister(self._pieces.pop())) != 0:
                _clear_cuda_error()


def _clear_cuda_error() -> None:
    """Takes the driver's "last error" away, so that the next kernel is not blamed for it.

    The check behind any kernel launch reads and clears it; torch has no call for that alone.
    """
    with contextlib.suppress(RuntimeError):
        torch.zeros(1, device="cuda").add_(1)


class CudaJob:
    """A batch of copies on the lane's stream; see `TransferJob`."""

    def __init__(self, size: int, began: torch.cuda.Event, ended: torch.cuda.Event) -> None:
        """`size` is in bytes; the events enclose the copies."""
        self._size = size
        self._began = began
        self._ended = ended

    @property
    def bytes(self) -> int:
        """Bytes that the job moves."""
        return self._size

    @property
    def seconds(self) -> float:
        """Time between the events on the device; waits for the job."""
        self._ended.synchronize()
        return float(self._began.elapsed_time(self._ended)) / 1e3

    def done(self) -> bool:
        """Whether every byte has arrived."""
        return bool(self._ended.query())

    def wait(self) -> None:
        """Waits until every byte has arrived."""
        self._ended.synchronize()


class CudaLane:
    """Runs copies of CUDA tensors in order on its own stream; see `TransferLane`."""

    def __init__(
        self, rows: torch.Tensor, canonical: Sequence[torch.Tensor], blocks_per_chunk: int
    ) -> None:
        """Registers the region with CUDA.

        `rows` is the region as uint8 `(slots, slot_bytes)`; `canonical` are the int8 tensors
        `(num_blocks, page_bytes)` of a KV cache.
        """
        self._rows = rows.view(torch.int8)
        self._canonical = list(canonical)
        self._blocks_per_chunk = blocks_per_chunk
        self._device = canonical[0].device
        self._widths = [tensor.shape[1] * blocks_per_chunk for tensor in canonical]
        self._chunk_bytes = sum(self._widths)
        self._stream = torch.cuda.Stream(self._device)
        self._pinned = PinnedRegion(rows)

    @property
    def pinned(self) -> bool:
        """Whether copies are asynchronous."""
        return self._pinned.pinned

    def submit(
        self, block_ids: NDArray[np.int64], slots: NDArray[np.uint32], *, to_slots: bool
    ) -> CudaJob:
        """Queues the copies behind the compute stream's present work."""
        compute = torch.cuda.current_stream(self._device)
        began = torch.cuda.Event(enable_timing=True)
        ended = torch.cuda.Event(enable_timing=True)
        self._stream.wait_stream(compute)
        with torch.cuda.stream(self._stream):
            ids = torch.from_numpy(block_ids).to(self._device)
            began.record(self._stream)
            if to_slots:
                self._store(ids, slots)
            else:
                self._load(ids, slots)
            ended.record(self._stream)
        if not to_slots:
            compute.wait_event(ended)
        return CudaJob(len(slots) * self._chunk_bytes, began, ended)

    def _store(self, ids: torch.Tensor, slots: NDArray[np.uint32]) -> None:
        staging = torch.cat(
            [
                tensor.index_select(0, ids.view(-1)).view(len(slots), width)
                for tensor, width in zip(self._canonical, self._widths, strict=True)
            ],
            dim=1,
        )
        for chunk, slot in enumerate(slots.tolist()):
            target = self._rows[slot, : self._chunk_bytes]
            target.copy_(staging[chunk], non_blocking=True)

    def _load(self, ids: torch.Tensor, slots: NDArray[np.uint32]) -> None:
        staging = torch.empty(
            (len(slots), self._chunk_bytes), dtype=torch.int8, device=self._device
        )
        for chunk, slot in enumerate(slots.tolist()):
            source = self._rows[slot, : self._chunk_bytes]
            staging[chunk].copy_(source, non_blocking=True)
        parts = torch.split(staging, self._widths, dim=1)
        for tensor, part in zip(self._canonical, parts, strict=True):
            tensor.index_copy_(0, ids.view(-1), part.reshape(-1, tensor.shape[1]))

    def close(self) -> None:
        """Waits for queued copies and undoes the registration. Idempotent."""
        self._stream.synchronize()
        self._pinned.close()
