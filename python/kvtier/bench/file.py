"""The file tier beside fio and vLLM's file system tier, on one directory in one run.

Stores and loads go through the manager: out of the primary region to disk and back, checksums
included. Every round writes as many bytes as `size` says and reads them back.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from kvtier.bench.figures import Figure, alternate, compared, untaken
from kvtier.bench.file_reopen import FACTS, fill_and_kill, reopen
from kvtier.bench.file_rivals import Fio, VllmTier, vllm_tier
from kvtier.bench.file_store import file_store
from kvtier.bench.tier_store import TierStore, cpu_seconds

__all__ = ["measure"]

_CHUNKS = {"1MiB": 1 << 20, "64KiB": 64 << 10}
_TARGET_FIO = {"1MiB": 0.95, "64KiB": 0.85}
_TARGET_VLLM = {"1MiB": None, "64KiB": 3.0}
_TARGET_CPU = {"1MiB": 0.5, "64KiB": None}
_TARGET_WARM = 0.8
_TARGET_LOOKUP_NS = 100.0
_TARGET_CHECKPOINT_S, _TARGET_HEADERS_S = 2.0, 20.0
_THREADS = 2


def measure(*, directory: str | None, size: int, chunks: int, rounds: int) -> Iterator[Figure]:
    """Yields the figures, taken in a directory that is made in `directory` and removed."""
    with tempfile.TemporaryDirectory(prefix="kvtier-bench-", dir=directory) as name:
        for label, chunk in _CHUNKS.items():
            place = Path(name) / label
            place.mkdir()
            yield from _beside_fio(place, label, chunk, size, rounds)
            yield from _beside_vllm(place, label, chunk, size, rounds)
        yield from _warm(Path(name) / "warm", size, rounds)
        yield from _lookup(Path(name) / "lookup", rounds)
        yield from _reopen(Path(name) / "reopen", chunks, min(rounds, 3))


def _rate(store: TierStore, run: Callable[[], float]) -> Callable[[], float]:
    return lambda: store.nbytes / run() / 1e9


def _beside_fio(place: Path, label: str, chunk: int, size: int, rounds: int) -> Iterator[Figure]:
    fio = Fio(place, chunk, size)
    installed = Fio.is_installed()
    with file_store(place / "store", chunk, size) as ours:
        for verb, run, theirs in (("store", ours.store, "write"), ("load", ours.load, "read")):
            takes = [_rate(ours, run)]
            if installed:
                takes.append(lambda theirs=theirs: fio.rate(theirs))  # type: ignore[misc]
            taken = alternate(rounds, *takes)
            yield compared(
                f"file.{verb}.{label}.direct",
                "GB/s",
                taken[0],
                reference="fio" if installed else None,
                theirs=taken[1] if installed else None,
                target=_TARGET_FIO[label] if installed else None,
            )
    (place / "fio").unlink(missing_ok=True)


def _beside_vllm(place: Path, label: str, chunk: int, size: int, rounds: int) -> Iterator[Figure]:
    if not VllmTier.is_installed():
        for verb in ("store", "load"):
            yield untaken(f"file.{verb}.{label}.vllm", "GB/s", "vllm is not installed")
        return
    with (
        file_store(place / "store", chunk, size) as ours,
        vllm_tier(place, chunk, size) as theirs,
    ):
        for verb, mine, vllm in (
            ("store", ours.store, theirs.store),
            ("load", ours.load, theirs.load),
        ):
            used: tuple[list[float], list[float]] = ([], [])

            def take(run: Callable[[], float], seconds: list[float]) -> float:
                before = cpu_seconds()
                rate = ours.nbytes / run() / 1e9
                seconds.append((cpu_seconds() - before) / (ours.nbytes / 1e9))
                return rate

            taken = alternate(
                rounds,
                lambda mine=mine, used=used: take(mine, used[0]),  # type: ignore[misc]
                lambda vllm=vllm, used=used: take(vllm, used[1]),  # type: ignore[misc]
            )
            yield compared(
                f"file.{verb}.{label}.vllm",
                "GB/s",
                taken[0],
                reference="vLLM fs tier",
                theirs=taken[1],
                target=_TARGET_VLLM[label],
            )
            yield compared(
                f"file.{verb}_cpu.{label}",
                "s/GB",
                used[0][1:],
                reference="vLLM fs tier",
                theirs=used[1][1:],
                target=_TARGET_CPU[label],
                smaller_is_better=True,
            )


def _warm(place: Path, size: int, rounds: int) -> Iterator[Figure]:
    """Loads out of the page cache, beside memcpy on as many threads."""
    chunk = _CHUNKS["1MiB"]
    with (
        file_store(place, chunk, size, io="mmap", threads=_THREADS) as ours,
        ThreadPoolExecutor(_THREADS) as pool,
    ):
        ours.store()
        source, target = np.ones(ours.nbytes, np.uint8), np.zeros(ours.nbytes, np.uint8)

        def memcpy() -> float:
            parts = zip(
                np.array_split(target, ours.count), np.array_split(source, ours.count), strict=True
            )
            began = time.perf_counter()
            # numpy copies contiguous bytes with memcpy, without the interpreter's lock.
            list(pool.map(lambda part: np.copyto(*part), parts))
            return ours.nbytes / (time.perf_counter() - began) / 1e9

        mine, plain = alternate(rounds, _rate(ours, ours.load), memcpy)
    yield compared(
        "file.load.1MiB.warm", "GB/s", mine, reference="memcpy", theirs=plain, target=_TARGET_WARM
    )


def _lookup(place: Path, rounds: int) -> Iterator[Figure]:
    """Look-ups of keys that only the file tier knows of, with answers of the whole manager."""
    chunk, count = 4096, 8192
    with file_store(place, chunk, count * chunk) as ours:
        ours.store()
        ours.manager.reset()
        ours.manager.reset_flushed()
        # Misses are looked for in the primary tier and in the file tier, and promote nothing.
        keys = ours.keys.copy()
        keys[:, -1] = 1

        def take() -> float:
            began = time.perf_counter()
            ours.manager.lookup(3, keys)
            return (time.perf_counter() - began) / count * 1e9

        (taken,) = alternate(rounds, take)
    yield compared("file.lookup", "ns", taken, target=_TARGET_LOOKUP_NS, smaller_is_better=True)


def _reopen(place: Path, chunks: int, rounds: int) -> Iterator[Figure]:
    fill_and_kill(place, chunks)
    for name, target in (("checkpoint", _TARGET_CHECKPOINT_S), ("headers", _TARGET_HEADERS_S)):

        def take(name: str = name) -> float:
            if name == "headers":
                for facts in FACTS:
                    (place / facts).unlink()
            return reopen(place, chunks)

        (taken,) = alternate(rounds, take)
        yield compared(
            f"file.reopen.{chunks}.{name}", "s", taken, target=target, smaller_is_better=True
        )
