"""CPU tensors to slots and back, beside torch's memcpy of the same bytes on as many threads."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import torch

from kvtier.bench.figures import Figure, alternate, compared
from kvtier.bench.paged import paged

__all__ = ["measure_host"]

_PAGES_KIB = (4, 16, 64, 1024)
_TARGET = 0.9


def measure_host(size: int, rounds: int) -> Iterator[Figure]:
    """Yields store and load for every size of pages, `size` bytes at a time."""
    for page_kib in _PAGES_KIB:
        yield from _one_page_size(page_kib, size, rounds)


def _one_page_size(page_kib: int, size: int, rounds: int) -> Iterator[Figure]:
    with paged(page_kib << 10, size, "cpu") as cache:
        plain = torch.ones(cache.nbytes, dtype=torch.uint8)

        def rate(run: Callable[[], object]) -> Callable[[], float]:
            def take() -> float:
                began = time.perf_counter()
                run()
                return cache.nbytes / (time.perf_counter() - began) / 1e9

            return take

        for verb, ours, theirs in (
            ("store", lambda: cache.store().wait(), lambda: cache.rows.copy_(plain)),
            ("load", lambda: cache.load().wait(), lambda: plain.copy_(cache.rows)),
        ):
            mine, memcpy = alternate(rounds, rate(ours), rate(theirs))
            yield compared(
                f"transfer.{verb}.{page_kib}KiB.cpu",
                "GB/s",
                mine,
                reference="memcpy",
                theirs=memcpy,
                target=_TARGET,
            )
