"""Block tables of 256 requests with 8,192 blocks each in 4 groups: host side and device side."""

from __future__ import annotations

import time
from collections.abc import Iterator

import numpy as np
import torch

from kvtier.bench.figures import Figure, alternate, compared
from kvtier.torch import BlockTables, TableGroup

__all__ = ["measure_tables"]

_REQUESTS, _BLOCKS, _GROUPS, _BLOCK_SIZE = 256, 8192, 4, 16
_STEPS = 20
_TARGET_HOST_US, _TARGET_DEVICE_US = 1.0, 30.0


def measure_tables(device: str, rounds: int) -> Iterator[Figure]:
    """Yields the host's microseconds a changed request, and on CUDA those of a step's launch."""
    groups = [TableGroup(_BLOCK_SIZE, _BLOCKS) for _ in range(_GROUPS)]
    tables = BlockTables(groups, _REQUESTS, _REQUESTS, device)
    rows = list(range(_REQUESTS))
    one_more = np.ones((_GROUPS, _REQUESTS), np.int64)
    ids = np.arange(one_more.size)

    def fill(blocks: int) -> None:
        tables.clear(rows)
        tables.append_many(rows, one_more * blocks, np.arange(one_more.size * blocks) % 1000)
        tables.apply()

    def stage() -> float:
        """Every request gets a block in every group, as in a step that crosses a block's end."""
        began = time.perf_counter()
        tables.append_many(rows, one_more, ids)
        tables.stage_step(rows, None, _REQUESTS)
        return (time.perf_counter() - began) / _REQUESTS * 1e6

    fill(_BLOCKS - rounds - 1)
    (taken,) = alternate(rounds, stage)
    yield compared(
        f"tables.stage_a_request.{device}",
        "us",
        taken,
        target=_TARGET_HOST_US,
        smaller_is_better=True,
    )
    if device != "cuda":
        return
    fill(_BLOCKS)
    starts = torch.arange(_REQUESTS + 1, dtype=torch.int32, device=device)
    positions = torch.full((_REQUESTS,), _BLOCKS * _BLOCK_SIZE - 1, device=device)
    tables.stage_step(rows, None, _REQUESTS)

    def step() -> float:
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        began.record()
        for _ in range(_STEPS):
            tables.run_step(starts, positions)
        ended.record()
        ended.synchronize()
        return float(began.elapsed_time(ended)) / _STEPS * 1e3

    (taken,) = alternate(rounds, step)
    yield compared(
        "tables.step.cuda", "us", taken, target=_TARGET_DEVICE_US, smaller_is_better=True
    )
