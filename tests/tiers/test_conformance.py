from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import kvtier.testing
from kvtier import HIT, MISS, RETRY, JobResult, TierContext, TierJob, TierUsage


class TestMemoryTier(kvtier.testing.TierConformance):
    recency = True

    def config(self, path: Path, capacity_bytes: int) -> Mapping[str, Any]:  # noqa: ARG002
        return {"type": "memory", "capacity_bytes": capacity_bytes}


class TestFileTier(kvtier.testing.TierConformance):
    persistent = True
    recency = True

    def config(self, path: Path, capacity_bytes: int) -> Mapping[str, Any]:
        return {"type": "file", "path": path, "capacity_bytes": capacity_bytes}

    def damage(self, path: Path) -> None:
        for segment in path.glob("segment-*"):
            with segment.open("r+b") as file:
                for page in range(0, segment.stat().st_size, 4096):
                    file.seek(page)
                    byte = file.read(1)[0]
                    file.seek(page)
                    file.write(bytes([byte ^ 1]))


class Concurrent(kvtier.SecondaryTier):
    """Moves chunks, and asks for keys, on threads of its own. (`docs/tiers.md` has one that does
    everything in the calls; `test_docs.py` runs the suite for it.)"""

    medium = "network"
    locality = "remote"

    def __init__(self, context: TierContext, *, capacity_bytes: int) -> None:
        super().__init__(context)
        self.capacity = capacity_bytes // context.chunk_bytes
        self.lock = threading.Lock()
        self.kept: dict[bytes, tuple[bytes, int]] = {}
        self.asked: dict[bytes, int] = {}
        self.results: list[JobResult] = []
        self.threads = ThreadPoolExecutor(3)

    def lookup(self, keys: Sequence[bytes]) -> Sequence[int]:
        with self.lock:
            answers = [self.asked.pop(key, RETRY) for key in keys]
        unknown = [key for key, answer in zip(keys, answers, strict=True) if answer == RETRY]
        if unknown:
            self.threads.submit(self.ask, unknown)
        return answers

    def ask(self, keys: Sequence[bytes]) -> None:
        with self.lock:
            self.asked.update((key, HIT if key in self.kept else MISS) for key in keys)

    def submit_store(self, job: TierJob) -> None:
        self.threads.submit(self.store, job)

    def store(self, job: TierJob) -> None:
        evicted = []
        for key, chunk, checksum in zip(job.keys, job.chunks, job.checksums, strict=True):
            copy = bytes(chunk)
            with self.lock:
                self.kept.pop(key, None)
                self.kept[key] = (copy, checksum)
                if len(self.kept) > self.capacity:
                    evicted.append(next(iter(self.kept)))
                    del self.kept[evicted[-1]]
        self.report(JobResult(job.id, done=job.keys, evicted=evicted))

    def submit_load(self, job: TierJob) -> None:
        self.threads.submit(self.load, job)

    def load(self, job: TierJob) -> None:
        done = {}
        for key, chunk in zip(job.keys, job.chunks, strict=True):
            with self.lock:
                kept = self.kept.get(key)
            if kept is not None:
                chunk[:], done[key] = kept
        failed = {key: "missing" for key in job.keys if key not in done}
        self.report(JobResult(job.id, done=done, failed=failed))

    def report(self, result: JobResult) -> None:
        with self.lock:
            self.results.append(result)
        self.context.notify()

    def finished(self) -> Iterable[JobResult]:
        with self.lock:
            results, self.results = self.results, []
        return results

    def usage(self) -> TierUsage:
        with self.lock:
            chunks = len(self.kept)
        size = self.context.chunk_bytes
        return TierUsage(self.capacity * size, chunks * size, chunks)

    def shutdown(self) -> None:
        self.threads.shutdown()


class TestConcurrentTier(kvtier.testing.TierConformance):
    def config(self, path: Path, capacity_bytes: int) -> Mapping[str, Any]:  # noqa: ARG002
        return {"type": f"{__name__}:Concurrent", "capacity_bytes": capacity_bytes}
