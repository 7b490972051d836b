"""A step of the block tables with torch operations on CPU tensors."""

from __future__ import annotations

import numpy as np
import torch

from kvtier.torch.block_table import PAD_SLOT, TableState
from kvtier.torch.block_table_work import StepWork, ragged_index

__all__ = ["HostRunner"]


class HostRunner:
    """See `StepRunner`."""

    def __init__(self, state: TableState) -> None:
        """Works on the tensors of `state`."""
        self._state = state
        self._work: StepWork | None = None

    def upload(self, work: StepWork) -> None:
        """Keeps the work for `run`."""
        self._work = work

    def run(
        self,
        *,
        gather: bool,
        query_starts: torch.Tensor | None,
        positions: torch.Tensor | None,
    ) -> None:
        """Does what was uploaded."""
        work = self._work
        if work is None:
            return
        rows = torch.from_numpy(work.rows).long()
        for number in range(len(self._state.groups)):
            self._write(work, rows, number)
            if gather:
                batch = self._state.batch[number]
                batch[: work.num_batch] = self._state.tables[number][rows[: work.num_batch]]
                batch[work.num_batch : work.padded_rows] = 0
            if query_starts is not None and positions is not None:
                self._map_slots(work, rows, number, query_starts, positions)

    def _write(self, work: StepWork, rows: torch.Tensor, number: int) -> None:
        ratio, table = self._state.groups[number].ratio, self._state.tables[number]
        starts, counts, offsets = (
            work.column(index)[number].astype(np.int64) for index in range(3)
        )
        if not counts.sum():
            return
        ids = torch.from_numpy(work.ids[ragged_index(offsets, counts)])
        columns = torch.from_numpy(ragged_index(starts, counts))
        kernel = torch.arange(ratio, dtype=torch.int32)
        at = rows.repeat_interleave(torch.from_numpy(counts))
        where = columns[:, None] * ratio + kernel
        table[at[:, None], where] = ids[:, None] * ratio + kernel

    def _map_slots(
        self,
        work: StepWork,
        rows: torch.Tensor,
        number: int,
        query_starts: torch.Tensor,
        positions: torch.Tensor,
    ) -> None:
        group, parallel = self._state.groups[number], self._state.context_parallel
        slots = self._state.slots[number]
        starts = query_starts[: work.num_batch + 1].long()
        first, last = int(starts[0]), int(starts[-1])
        slots[last : work.padded_tokens] = PAD_SLOT
        if not group.maps_slots:
            slots[first:last] = PAD_SLOT
            return
        request = torch.arange(work.num_batch).repeat_interleave(starts.diff())
        local = positions[first:last]
        here = torch.ones_like(local, dtype=torch.bool)
        if group.context_parallel and parallel.size > 1:
            size, interleave = parallel.size, parallel.interleave
            block, offset = local // (group.block_size * size), local % (group.block_size * size)
            here = offset // interleave % size == parallel.rank
            offset = offset // (interleave * size) * interleave + offset % interleave
            local = block * group.block_size + offset
        lengths = torch.from_numpy(work.column(3)[number].astype(np.int64))[request]
        here &= (local >= 0) & (local < lengths * group.block_size)
        column = torch.where(here, local // group.kernel_size, 0)
        blocks = self._state.tables[number][rows[request], column].long()
        mapped = blocks * group.kernel_size + local % group.kernel_size
        slots[first:last] = torch.where(here, mapped, PAD_SLOT)
