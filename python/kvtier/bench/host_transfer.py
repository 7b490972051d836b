"""CPU tensors to slots and back, beside memcpy of the same bytes on as many threads."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from numpy.typing import NDArray

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
    threads = torch.get_num_threads()
    with paged(page_kib << 10, size, "cpu") as cache, ThreadPoolExecutor(threads) as pool:
        slots, plain = cache.rows.numpy(), np.ones(cache.nbytes, np.uint8)

        def memcpy(to: NDArray[np.uint8], source: NDArray[np.uint8]) -> None:
            # numpy copies contiguous bytes with memcpy, without the interpreter's lock.
            parts = zip(np.array_split(to, threads), np.array_split(source, threads), strict=True)
            list(pool.map(lambda part: np.copyto(*part), parts))

        def rate(run: Callable[[], object]) -> Callable[[], float]:
            def take() -> float:
                began = time.perf_counter()
                run()
                return cache.nbytes / (time.perf_counter() - began) / 1e9

            return take

        for verb, ours, theirs in (
            ("store", lambda: cache.store().wait(), lambda: memcpy(slots, plain)),
            ("load", lambda: cache.load().wait(), lambda: memcpy(plain, slots)),
        ):
            mine, plainly = alternate(rounds, rate(ours), rate(theirs))
            yield compared(
                f"transfer.{verb}.{page_kib}KiB.cpu",
                "GB/s",
                mine,
                reference="memcpy",
                theirs=plainly,
                target=_TARGET,
            )
