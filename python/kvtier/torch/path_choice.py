"""Which copy path is the fastest here, by trying them.

What wins depends on the size of the pieces, the link, the driver and the direction, so each group
is measured once when a KV cache is registered: on scratch memory arranged like the group's own,
with the largest transfer that fits into it. Groups that are arranged alike share the result.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from kvtier.errors import DeviceError
from kvtier.torch.chunk_layout import GroupLayout
from kvtier.torch.copy_paths import CopyPath, GroupTable

__all__ = ["Measured", "choose_paths"]

_SCRATCH_BYTES = 32 << 20
_SCRATCH_BLOCKS = 4096
_ROUNDS = 3

_log = logging.getLogger(__name__)

Timer = Callable[[Callable[[], None]], float]
"""Runs something on the device; returns the seconds it took there."""


@dataclass(frozen=True)
class Measured:
    """What one path did with one group in one direction."""

    path: CopyPath
    seconds: float
    nbytes: int


def choose_paths(
    paths: Sequence[CopyPath],
    layouts: Sequence[GroupLayout],
    widths: Sequence[int],
    blocks_per_chunk: int,
    device: torch.device,
    stream: int,
    timer: Timer,
) -> dict[tuple[int, bool], list[Measured]]:
    """Measures every path that fits, for each group and direction; the fastest comes first.

    `widths` are the bytes of the canonical tensors' rows. A path that the device refuses is left
    out, and logged. Keys are `(group, to_slots)`.
    """
    known: dict[tuple[object, ...], list[Measured]] = {}
    chosen: dict[tuple[int, bool], list[Measured]] = {}
    for group, layout in enumerate(layouts):
        for to_slots in (True, False):
            alike = (to_slots, layout.block_bytes, *sorted(piece.nbytes for piece in layout.pieces))
            if alike not in known:
                scratch = _Scratch(layout, widths, blocks_per_chunk, device)
                known[alike] = scratch.measure(paths, stream, timer, to_slots=to_slots)
                _log.info(
                    "%s: %s",
                    "stores" if to_slots else "loads",
                    ", ".join(
                        f"{one.path.name} {one.nbytes / one.seconds / 1e9:.1f} GB/s"
                        for one in known[alike]
                    ),
                )
            chosen[group, to_slots] = known[alike]
    return chosen


class _Scratch:
    """Blocks and slots arranged like a group's own, with nothing in them."""

    def __init__(
        self,
        layout: GroupLayout,
        widths: Sequence[int],
        blocks_per_chunk: int,
        device: torch.device,
    ) -> None:
        used = {piece.tensor for piece in layout.pieces}
        row_bytes = sum(widths[tensor] for tensor in used)
        chunks = max(1, min(_SCRATCH_BYTES // row_bytes, _SCRATCH_BLOCKS) // blocks_per_chunk)
        blocks = chunks * blocks_per_chunk
        tensors = [
            torch.zeros((blocks if index in used else 1, width), dtype=torch.int8, device=device)
            for index, width in enumerate(widths)
        ]
        self.table = GroupTable(tensors, layout, blocks_per_chunk)
        self.slots = torch.zeros(
            (chunks, layout.block_bytes * blocks_per_chunk),
            dtype=torch.uint8,
            pin_memory=device.type == "cuda",
        )
        order = np.random.default_rng(0).permutation(blocks)
        places = np.arange(blocks)
        columns = [order, places // blocks_per_chunk, places % blocks_per_chunk, places]
        self.moves = np.stack(columns, axis=1).astype(np.int64)
        self.nbytes = blocks * sum(piece.nbytes for piece in layout.pieces)

    def measure(
        self, paths: Sequence[CopyPath], stream: int, timer: Timer, *, to_slots: bool
    ) -> list[Measured]:
        results = []
        for path in paths:
            if not path.fits(self.table, to_slots=to_slots, pinned=True):
                continue

            def run(path: CopyPath = path) -> None:
                path.copy(
                    self.table,
                    self.moves,
                    self.slots,
                    to_slots=to_slots,
                    sources_ready=True,
                    stream=stream,
                )

            try:
                run()  # the first time compiles and allocates
                seconds = min(timer(run) for _ in range(_ROUNDS))
            except (DeviceError, RuntimeError) as error:
                _log.warning("copy path %s does not work here: %s", path.name, error)
                continue
            results.append(Measured(path, seconds, self.nbytes))
        return sorted(results, key=lambda one: one.seconds)
