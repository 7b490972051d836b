"""The ways in which blocks of a GPU get to slots and back; `kvtier.torch.path_choice` picks one.

| path | what it queues | fits |
|---|---|---|
| `BatchedMemcpy` | one call for all pieces, for the copy engines | large pages, no GPU cores |
| `KernelCopy` | one kernel that reads and writes pinned memory in place | small pages |
| `StagedCopy` | a kernel and a staging buffer, one copy a chunk | small pages, pageable memory |
| `PiecewiseCopy` | one copy a piece | anything, slowly |

Every path works on addresses or tensors alone, so the tests run all of them on CPU tensors.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from kvtier._kvtier import Moves
from kvtier.torch.chunk_layout import GroupLayout

__all__ = [
    "BatchedMemcpy",
    "BatchingDriver",
    "CopyPath",
    "GroupTable",
    "KernelCopy",
    "PiecewiseCopy",
    "StagedCopy",
    "move_table",
]

_SLOT, _POSITION = 1, 2  # columns of a move table
_KERNEL_WORDS = 1024


def move_table(moves: Moves, blocks_per_chunk: int) -> NDArray[np.int64]:
    """int64 `(moves, 4)`: block, slot, position, and the place by which ranks take turns."""
    slots, positions = moves.slots, moves.positions
    places = slots * blocks_per_chunk + positions
    return np.ascontiguousarray(np.stack([moves.block_ids, slots, positions, places], axis=1))


class GroupTable:
    """Where the pieces of a group lie: on the device, and in numpy for the host."""

    def __init__(
        self, tensors: Sequence[torch.Tensor], layout: GroupLayout, blocks_per_chunk: int
    ) -> None:
        """`tensors` are the canonical ones that the pieces of `layout` index."""
        self.tensors = list(tensors)
        self.layout = layout
        self.blocks_per_chunk = blocks_per_chunk
        rows = [
            (
                tensors[piece.tensor].data_ptr() + piece.offset,
                tensors[piece.tensor].stride(0),
                piece.nbytes,
                piece.slot_offset,
                piece.turns,
                piece.turn,
            )
            for piece in layout.pieces
        ]
        self.pieces = np.array(rows, np.int64).reshape(-1, 6)
        self.on_device = torch.from_numpy(self.pieces).to(tensors[0].device)
        self.alignment = _word(
            math.gcd(layout.block_bytes, *self.pieces[:, :4].reshape(-1).tolist())
        )

    @property
    def is_dense(self) -> bool:
        """Whether this rank writes every byte of a block in a chunk."""
        written = sum(piece.nbytes for piece in self.layout.pieces if piece.turns == 1)
        return written == self.layout.block_bytes


class CopyPath(Protocol):
    """One way to copy. `slots` is uint8 `(slots, slot_bytes)`, in host memory."""

    name: str

    def fits(self, table: GroupTable, *, to_slots: bool, pinned: bool) -> bool:
        """Whether the path can move this group; `pinned`: the slots are registered with CUDA."""

    def copy(
        self,
        table: GroupTable,
        moves: NDArray[np.int64],
        slots: torch.Tensor,
        *,
        to_slots: bool,
        sources_ready: bool,
        stream: int,
    ) -> None:
        """Queues the copies on the current stream of the device, whose handle is `stream`.

        `sources_ready`: nothing that is queued on a stream still writes the source.
        """


class BatchingDriver(Protocol):
    """What is needed of `kvtier.torch.cuda_driver.Driver`."""

    @property
    def has_batched_memcpy(self) -> bool:
        """Whether `memcpy_batch` can be called."""

    def memcpy_batch(
        self,
        targets: NDArray[np.int64],
        sources: NDArray[np.int64],
        sizes: NDArray[np.int64],
        *,
        source_order: int,
        stream: int,
    ) -> None:
        """Queues copies."""


class BatchedMemcpy:
    """All pieces in one call of the driver."""

    name = "batched memcpy"

    def __init__(self, driver: BatchingDriver, in_stream_order: int, any_time: int) -> None:
        """The driver, and its two values for when a source may be read."""
        self._driver = driver
        self._orders = {False: in_stream_order, True: any_time}

    def fits(self, table: GroupTable, *, to_slots: bool, pinned: bool) -> bool:
        """Pinned slots, and a driver that has the call."""
        del table, to_slots
        return pinned and self._driver.has_batched_memcpy

    def copy(
        self,
        table: GroupTable,
        moves: NDArray[np.int64],
        slots: torch.Tensor,
        *,
        to_slots: bool,
        sources_ready: bool,
        stream: int,
    ) -> None:
        """See `CopyPath`."""
        start, stride, nbytes, offset, turns, turn = table.pieces.T
        block, slot, position, place = moves.T[:, :, None]
        pages = start + block * stride
        chunks = (
            slots.data_ptr() + slot * slots.stride(0) + position * table.layout.block_bytes + offset
        )
        sizes = np.broadcast_to(nbytes, pages.shape)
        mine = (place % turns == turn) if to_slots else np.ones_like(pages, bool)
        pages, chunks, sizes = pages[mine], chunks[mine], sizes[mine]
        self._driver.memcpy_batch(
            chunks if to_slots else pages,
            pages if to_slots else chunks,
            sizes,
            source_order=self._orders[sources_ready and not to_slots],
            stream=stream,
        )


class KernelCopy:
    """One kernel that works on pinned memory in place."""

    name = "kernel"

    def __init__(self, programs: int) -> None:
        """`programs` run at once: enough to fill the link, few enough to leave the GPU alone."""
        self._programs = programs

    def fits(self, table: GroupTable, *, to_slots: bool, pinned: bool) -> bool:
        """Pinned slots."""
        del table, to_slots
        return pinned

    def copy(
        self,
        table: GroupTable,
        moves: NDArray[np.int64],
        slots: torch.Tensor,
        *,
        to_slots: bool,
        sources_ready: bool,
        stream: int,
    ) -> None:
        """See `CopyPath`."""
        from kvtier.torch.copy_kernel import copy_blocks  # Triton is slow to import

        del sources_ready, stream
        if not len(moves):
            return
        table_on_device = _to_device(moves, table.on_device.device)
        alignment = _word(math.gcd(table.alignment, slots.data_ptr(), slots.stride(0)))
        copies = len(moves) * len(table.pieces)
        copy_blocks[(min(self._programs, copies),)](
            table_on_device,
            table.on_device,
            slots.data_ptr(),
            len(moves),
            len(table.pieces),
            slots.stride(0),
            table.layout.block_bytes,
            TO_SLOTS=to_slots,
            ALIGNMENT=alignment,
            WORDS=_KERNEL_WORDS,
        )


class StagedCopy:
    """A kernel between pages and a staging buffer, and one copy a chunk between that and a slot."""

    name = "staging"

    def __init__(self, staging_bytes: int, programs: int) -> None:
        """The buffer is made at first use; a transfer that is larger goes through it in rounds."""
        self._staging_bytes = staging_bytes
        self._staging: dict[tuple[torch.device, int], torch.Tensor] = {}
        self._kernel = KernelCopy(programs)

    def fits(self, table: GroupTable, *, to_slots: bool, pinned: bool) -> bool:
        """A store must write whole blocks: the copy would overwrite what other ranks stored."""
        del pinned
        return table.is_dense or not to_slots

    def copy(
        self,
        table: GroupTable,
        moves: NDArray[np.int64],
        slots: torch.Tensor,
        *,
        to_slots: bool,
        sources_ready: bool,
        stream: int,
    ) -> None:
        """See `CopyPath`."""
        block_bytes = table.layout.block_bytes
        chunk_bytes = -(-block_bytes * table.blocks_per_chunk // 16) * 16
        runs = list(_runs(moves))
        per_round = max(1, min(self._staging_bytes // chunk_bytes, len(runs)))
        buffer = self._buffer(table.on_device.device, stream, per_round * chunk_bytes)
        staging = buffer[: per_round * chunk_bytes].view(per_round, chunk_bytes)
        for first in range(0, len(runs), per_round):
            some = runs[first : first + per_round]
            staged = np.concatenate([run for _, run in some])
            staged[:, _SLOT] = np.repeat(np.arange(len(some)), [len(run) for _, run in some])
            if not to_slots:
                _cross(some, slots, staging, block_bytes, to_slots=False)
            self._kernel.copy(
                table,
                staged,
                staging,
                to_slots=to_slots,
                sources_ready=sources_ready,
                stream=stream,
            )
            if to_slots:
                _cross(some, slots, staging, block_bytes, to_slots=True)

    def _buffer(self, device: torch.device, stream: int, size: int) -> torch.Tensor:
        """One buffer a stream: copies of one stream never use it at the same time."""
        buffer = self._staging.get((device, stream))
        if buffer is None or buffer.numel() < size:
            buffer = torch.empty(size, dtype=torch.uint8, device=device)
            self._staging[device, stream] = buffer
        return buffer


class PiecewiseCopy:
    """One copy a piece: what is left where slots are pageable and shared by ranks."""

    name = "piecewise"

    def fits(self, table: GroupTable, *, to_slots: bool, pinned: bool) -> bool:
        """Always."""
        del table, to_slots, pinned
        return True

    def copy(
        self,
        table: GroupTable,
        moves: NDArray[np.int64],
        slots: torch.Tensor,
        *,
        to_slots: bool,
        sources_ready: bool,
        stream: int,
    ) -> None:
        """See `CopyPath`."""
        del sources_ready, stream
        for block, slot, position, place in moves.tolist():
            for piece in table.layout.pieces:
                if to_slots and place % piece.turns != piece.turn:
                    continue
                row = table.tensors[piece.tensor][block].view(torch.uint8)
                page = row[piece.offset : piece.offset + piece.nbytes]
                low = position * table.layout.block_bytes + piece.slot_offset
                chunk = slots[slot, low : low + piece.nbytes]
                if to_slots:
                    chunk.copy_(page, non_blocking=True)
                else:
                    page.copy_(chunk, non_blocking=True)


def _cross(
    runs: Sequence[tuple[int, NDArray[np.int64]]],
    slots: torch.Tensor,
    staging: torch.Tensor,
    block_bytes: int,
    *,
    to_slots: bool,
) -> None:
    """Queues one copy a chunk between row `i` of the staging buffer and the slot of run `i`."""
    for row, (slot, run) in enumerate(runs):
        positions = run[:, _POSITION]
        low, high = int(positions.min()) * block_bytes, (int(positions.max()) + 1) * block_bytes
        here, there = staging[row, low:high], slots[slot, low:high]
        if to_slots:
            there.copy_(here, non_blocking=True)
        else:
            here.copy_(there, non_blocking=True)


def _word(common: int) -> int:
    """The widest alignment that the kernel knows of which `common` is a multiple."""
    return next(size for size in (16, 4, 1) if common % size == 0)


def _runs(moves: NDArray[np.int64]) -> Iterator[tuple[int, NDArray[np.int64]]]:
    """Slot and moves of every chunk; a slot that is loaded twice in a row is one."""
    if not len(moves):
        return
    bounds = np.flatnonzero(np.diff(moves[:, _SLOT])) + 1
    for run in np.split(moves, bounds):
        yield int(run[0, _SLOT]), run.copy()


def _to_device(table: NDArray[np.int64], device: torch.device) -> torch.Tensor:
    tensor = torch.from_numpy(table)
    if device.type == "cpu":
        return tensor
    # Pinned, or the copy would wait for everything that the stream has queued.
    return tensor.pin_memory().to(device, non_blocking=True)
