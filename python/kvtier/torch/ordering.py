"""Which earlier jobs a transfer has to wait for.

Jobs of one lane run in the order they were submitted. Jobs of different lanes may overtake each
other, but not where one writes what the other reads or writes. For every lane, block and slot,
this keeps the number of the last job that touched it: 8 bytes each. A question costs one pass
over the ids of the transfer.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum

import numpy as np

from kvtier._kvtier import Moves

__all__ = ["Lane", "Ordering"]


class Lane(IntEnum):
    """Where a job queues."""

    STORE = 0
    LOAD = 1
    EXPEDITED = 2
    """Loads that somebody waits for: they do not queue behind other loads."""


class Ordering:
    """The last job of every lane on every block and slot. Numbers count from 1."""

    def __init__(self, num_blocks: int, num_slots: int) -> None:
        """Nothing was touched yet."""
        self._blocks = np.zeros((len(Lane), num_blocks), np.int64)
        self._slots = np.zeros((len(Lane), num_slots), np.int64)

    def add(self, number: int, lane: Lane, parts: Sequence[Moves]) -> list[int]:
        """Notes job `number`; returns the last job of each other lane that it must follow.

        A store follows loads into its blocks and loads of its slots; a load follows stores of
        its blocks and into its slots, and loads into its blocks. Two loads may read one slot at
        the same time.
        """
        others = [other for other in Lane if other is not lane]
        waits = dict.fromkeys(others, 0)
        for moves in parts:
            blocks, slots = moves.block_ids, moves.slots
            if not len(blocks):
                continue
            for other in others:
                waits[other] = max(waits[other], int(self._blocks[other, blocks].max()))
                if Lane.STORE in (lane, other):
                    waits[other] = max(waits[other], int(self._slots[other, slots].max()))
            self._blocks[lane, blocks] = number
            self._slots[lane, slots] = number
        return [before for before in waits.values() if before]
