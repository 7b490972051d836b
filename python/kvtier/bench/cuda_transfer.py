"""CUDA tensors to slots and back, beside one large pinned copy, and what it costs the GPU."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator

import torch

from kvtier.bench.figures import Figure, alternate, compared, untaken
from kvtier.bench.paged import Paged, paged
from kvtier.torch import TransferJob
from kvtier.torch.cuda_lanes import CudaLanes

__all__ = ["measure_cuda"]

_PAGES_KIB = (4, 8, 16, 32, 64, 256, 1024)
_LARGE_KIB = 64
_TARGET_LARGE, _TARGET_SMALL = 0.95, 0.85
_TARGET_BOTH = 0.85
_TARGET_MATMUL_PERCENT = 3.0
_MATMULS = 20


def measure_cuda(size: int, rounds: int) -> Iterator[Figure]:
    """Yields both directions for every size of pages, then both at once and beside a matmul."""
    plain = torch.ones(size, dtype=torch.uint8, pin_memory=True)
    on_device = torch.ones(size, dtype=torch.uint8, device="cuda")
    for page_kib in _PAGES_KIB:
        with paged(page_kib << 10, size, "cuda") as cache:
            why = _not_pinned(cache)
            if why is not None:
                for verb in ("store", "load"):
                    yield untaken(f"transfer.{verb}.{page_kib}KiB.cuda", "GB/s", why)
                continue
            yield from _each_direction(page_kib, cache, plain, on_device, rounds)
            if page_kib == _LARGE_KIB:
                yield _both_directions(cache, plain, on_device, rounds)
                yield _beside_a_matmul(cache, size, rounds)


def _not_pinned(cache: Paged) -> str | None:
    """Waits for the registration; returns why the region is not pinned."""
    lanes = cache.engine.lanes
    if not isinstance(lanes, CudaLanes):  # the device was asked for
        return "the KV cache is not on CUDA"
    lanes.pinned.wait()
    return lanes.pinned.failure


def _each_direction(
    page_kib: int, cache: Paged, plain: torch.Tensor, on_device: torch.Tensor, rounds: int
) -> Iterator[Figure]:
    host, device = plain[: cache.nbytes], on_device[: cache.nbytes]
    for verb, ours, theirs in (
        ("store", cache.store, lambda: host.copy_(device, non_blocking=True)),
        ("load", cache.load, lambda: device.copy_(host, non_blocking=True)),
    ):

        def mine(ours: Callable[[], TransferJob] = ours) -> float:
            return cache.nbytes / ours().seconds / 1e9

        def memcpy(theirs: Callable[[], object] = theirs) -> float:
            return cache.nbytes / _seconds(theirs) / 1e9

        taken = alternate(rounds, mine, memcpy)
        yield compared(
            f"transfer.{verb}.{page_kib}KiB.cuda",
            "GB/s",
            taken[0],
            reference="cudaMemcpyAsync",
            theirs=taken[1],
            target=_TARGET_LARGE if page_kib >= _LARGE_KIB else _TARGET_SMALL,
        )


def _both_directions(
    cache: Paged, plain: torch.Tensor, on_device: torch.Tensor, rounds: int
) -> Figure:
    """Half of the blocks each way at once, beside the sum of both directions' plain copies."""
    half = len(cache.slots) // 2
    host, device = plain[: cache.nbytes], on_device[: cache.nbytes]

    def mine() -> float:
        torch.cuda.synchronize()
        began = time.perf_counter()
        jobs = (
            cache.engine.store(cache.ids[:half], cache.slots[:half]),
            cache.engine.load(cache.ids[half : 2 * half], cache.slots[half : 2 * half]),
        )
        for job in jobs:
            job.wait()
        return sum(job.bytes for job in jobs) / (time.perf_counter() - began) / 1e9

    def memcpy() -> float:
        ways = (
            lambda: host.copy_(device, non_blocking=True),
            lambda: device.copy_(host, non_blocking=True),
        )
        return sum(cache.nbytes / _seconds(way) / 1e9 for way in ways)

    ours, theirs = alternate(rounds, mine, memcpy)
    return compared(
        f"transfer.both.{_LARGE_KIB}KiB.cuda",
        "GB/s",
        ours,
        reference="sum of both ways",
        theirs=theirs,
        target=_TARGET_BOTH,
    )


def _beside_a_matmul(cache: Paged, size: int, rounds: int) -> Figure:
    """How much longer bf16 matmuls of `size` bytes take while stores and loads run."""
    side = max(256, math.isqrt(size // (3 * torch.bfloat16.itemsize)) // 128 * 128)
    left, right, product = (
        torch.ones(side, side, dtype=torch.bfloat16, device="cuda") for _ in range(3)
    )

    def matmuls() -> None:
        for _ in range(_MATMULS):
            torch.matmul(left, right, out=product)

    def alone() -> float:
        return _seconds(matmuls)

    # Enough transfers to last as long as the matmuls.
    transfer = statistics.median(cache.store().seconds for _ in range(3))
    repeats = math.ceil(1.5 * alone() / transfer)
    half = len(cache.slots) // 2

    def beside() -> float:
        for _ in range(repeats):
            cache.engine.store(cache.ids[:half], cache.slots[:half])
            cache.engine.load(cache.ids[half:], cache.slots[half:])
        seconds = _seconds(matmuls)
        torch.cuda.synchronize()  # what is left of the transfers must not slow the next round
        return seconds

    slowed, quiet = alternate(rounds, beside, alone)
    percent = [100 * (with_ / without - 1) for with_, without in zip(slowed, quiet, strict=True)]
    return compared(
        "transfer.matmul_slower.cuda",
        "%",
        percent,
        target=_TARGET_MATMUL_PERCENT,
        smaller_is_better=True,
    )


def _seconds(run: Callable[[], object]) -> float:
    """Time that `run` takes on the device, on the current stream."""
    began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    began.record()
    run()
    ended.record()
    ended.synchronize()
    return float(began.elapsed_time(ended)) / 1e3
