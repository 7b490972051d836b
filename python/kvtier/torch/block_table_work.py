"""What one step of the block tables has to do, as one int32 array that crosses to the device once.

| entries | what |
|---|---|
| `HEADER` | requests to work on, requests in the batch, rows and tokens with padding |
| `max_requests` | table row of each request; those of the batch come first, in its order |
| `4 * groups * max_requests` | the four columns of each group and request, see `StepWork.column` |
| up to `capacity` | block ids |
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

__all__ = ["HEADER", "StepWork", "ragged_index"]

HEADER = 4


@dataclass(frozen=True)
class StepWork:
    """One step's work; see the module for `array`."""

    array: NDArray[np.int32]
    groups: int
    max_requests: int

    @property
    def num_requests(self) -> int:
        """Requests with staged blocks or in the batch."""
        return int(self.array[0])

    @property
    def num_batch(self) -> int:
        """Requests of the batch; they come first."""
        return int(self.array[1])

    @property
    def padded_rows(self) -> int:
        """Rows of the batch with padding."""
        return int(self.array[2])

    @property
    def padded_tokens(self) -> int:
        """Tokens of the batch with padding."""
        return int(self.array[3])

    @property
    def rows(self) -> NDArray[np.int32]:
        """Table row of each request."""
        return self.array[HEADER : HEADER + self.num_requests]

    def column(self, number: int) -> NDArray[np.int32]:
        """`(groups, num_requests)` of one column.

        0: place of the first staged block in its row; 1: staged blocks; 2: where their ids start
        in `ids`; 3: blocks of the row in all.
        """
        size = self.groups * self.max_requests
        start = HEADER + self.max_requests + number * size
        table = self.array[start : start + size].reshape(self.groups, self.max_requests)
        return table[:, : self.num_requests]

    @property
    def ids(self) -> NDArray[np.int32]:
        """The staged block ids."""
        return self.array[fixed_entries(self.groups, self.max_requests) :]


def fixed_entries(groups: int, max_requests: int) -> int:
    """Entries in front of the block ids."""
    return HEADER + max_requests + 4 * groups * max_requests


def ragged_index(starts: NDArray[np.int64], counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """`starts[i], starts[i] + 1, ...`, `counts[i]` of them, one `i` after the other."""
    ends = np.cumsum(counts)
    total = int(ends[-1]) if len(ends) else 0
    return np.repeat(starts - (ends - counts), counts) + np.arange(total)
