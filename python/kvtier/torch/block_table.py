"""Block tables that stay on the device: row = request, column = position in its blocks.

The scheduler stages writes on the host as they happen and applies them once per step with a
single indexed write, so a step costs one small copy whatever the number of requests. Readers
see applied writes only. Sizes and ids are checked on the host: no check waits for the device.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from kvtier.errors import LayoutError

__all__ = ["BlockTables"]


class BlockTables:
    """int32 tables of shape `(max_requests, max_blocks)` for blocks of `block_size` tokens."""

    def __init__(
        self, max_requests: int, max_blocks: int, block_size: int, device: torch.device | str
    ) -> None:
        """Raises `LayoutError` for a size below 1."""
        for name, value in (
            ("max_requests", max_requests),
            ("max_blocks", max_blocks),
            ("block_size", block_size),
        ):
            if value < 1:
                raise LayoutError(f"block tables with {name} = {value} are not possible")
        self.block_size = block_size
        self._table = torch.zeros((max_requests, max_blocks), dtype=torch.int32, device=device)
        self._lengths = [0] * max_requests
        self._applied = [0] * max_requests
        self._staged_at: list[int] = []
        self._staged_ids: list[int] = []

    @property
    def max_requests(self) -> int:
        """Number of rows."""
        return self._table.shape[0]

    @property
    def max_blocks(self) -> int:
        """Blocks that one row holds."""
        return self._table.shape[1]

    @property
    def device(self) -> torch.device:
        """Where the tables live."""
        return self._table.device

    def num_blocks(self, row: int) -> int:
        """Blocks of `row`, staged ones included."""
        self._check_row(row)
        return self._lengths[row]

    def append(self, row: int, block_ids: Sequence[int]) -> None:
        """Stages `block_ids` behind the blocks that `row` has.

        Raises `LayoutError`, with nothing staged, for a row that does not exist, a negative
        id, or more blocks than the row holds.
        """
        self._check_row(row)
        start = self._lengths[row]
        if start + len(block_ids) > self.max_blocks:
            raise LayoutError(
                f"row {row} has {start} blocks and can not take {len(block_ids)} more: "
                f"a row holds {self.max_blocks}"
            )
        if any(block < 0 for block in block_ids):
            raise LayoutError(f"row {row}: block id {min(block_ids)} is negative")
        base = row * self.max_blocks + start
        self._staged_at.extend(range(base, base + len(block_ids)))
        self._staged_ids.extend(block_ids)
        self._lengths[row] += len(block_ids)

    def clear(self, row: int) -> None:
        """Forgets the blocks of `row`, staged or applied; the row can be used again."""
        self._check_row(row)
        first, last = row * self.max_blocks, (row + 1) * self.max_blocks
        kept = [
            (at, block)
            for at, block in zip(self._staged_at, self._staged_ids, strict=True)
            if not first <= at < last
        ]
        self._staged_at = [at for at, _ in kept]
        self._staged_ids = [block for _, block in kept]
        self._lengths[row] = self._applied[row] = 0

    def apply(self) -> None:
        """Writes everything staged to the device, in one indexed write."""
        if self._staged_at:
            staged = torch.tensor([self._staged_at, self._staged_ids], dtype=torch.int64)
            staged = staged.to(self.device)
            self._table.view(-1)[staged[0]] = staged[1].to(torch.int32)
            self._staged_at.clear()
            self._staged_ids.clear()
        self._applied[:] = self._lengths

    def gather(self, rows: Sequence[int]) -> torch.Tensor:
        """Returns int32 `(len(rows), widest)` on the device, rows in the order asked for.

        `widest` is the longest of these rows; entries behind the end of a shorter row are
        undefined ids that attention masks away. Raises `LayoutError` for an unknown row.
        """
        for row in rows:
            self._check_row(row)
        widest = max((self._applied[row] for row in rows), default=0)
        index = torch.tensor(list(rows), dtype=torch.int64).to(self.device)
        return self._table[index, :widest]

    def slot_mapping(self, row: int, positions: Sequence[int] | NDArray[np.int64]) -> torch.Tensor:
        """Returns int64 `(len(positions),)` on the device: where each token's K and V go.

        A token slot is `block id * block_size + offset in the block`. Raises `LayoutError`
        for a position that the applied blocks of `row` do not cover.
        """
        self._check_row(row)
        at = np.asarray(positions, dtype=np.int64)
        covered = self._applied[row] * self.block_size
        if at.size and (at.min() < 0 or at.max() >= covered):
            raise LayoutError(
                f"row {row} covers positions 0 to {covered - 1} with {self._applied[row]} blocks, "
                f"but positions {at.min()} to {at.max()} were asked for"
            )
        where = torch.from_numpy(at).to(self.device)
        blocks = self._table[row, where // self.block_size].to(torch.int64)
        return blocks * self.block_size + where % self.block_size

    def _check_row(self, row: int) -> None:
        if not 0 <= row < self.max_requests:
            raise LayoutError(f"row {row} does not exist: there are {self.max_requests} rows")
