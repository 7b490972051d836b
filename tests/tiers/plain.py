"""A tier in Python that does all it has to, for tests to break, and a manager over it."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

import kvtier
from kvtier import HIT, MISS, RETRY, JobResult, TierContext, TierJob, TierUsage

KEY_BYTES = 8
PATIENCE_S = 30.0

_names = itertools.count()


def keys(*numbers: int) -> list[bytes]:
    return [number.to_bytes(KEY_BYTES, "little") for number in numbers]


class Plain(kvtier.SecondaryTier):
    """A dict of chunks; moves them at once."""

    made: list[Plain]

    def __init__(self, context: TierContext) -> None:
        super().__init__(context)
        self.kept: dict[bytes, tuple[bytes, int]] = {}
        self.results: list[Any] = []
        type(self).made.append(self)

    def lookup(self, keys: Sequence[bytes]) -> Sequence[int]:
        return [HIT if key in self.kept else MISS for key in keys]

    def submit_store(self, job: TierJob) -> None:
        for key, chunk, checksum in zip(job.keys, job.chunks, job.checksums, strict=True):
            self.kept[key] = (bytes(chunk), checksum)
        self.results.append(JobResult(job.id, done=job.keys))

    def submit_load(self, job: TierJob) -> None:
        self.results.append(JobResult(job.id, done=self.fill(job)))

    def fill(self, job: TierJob) -> dict[bytes, int]:
        for key, chunk in zip(job.keys, job.chunks, strict=True):
            chunk[:] = self.kept[key][0]
        return {key: self.kept[key][1] for key in job.keys}

    def finished(self) -> Iterable[JobResult]:
        results, self.results = self.results, []
        return results

    def usage(self) -> TierUsage:
        used = sum(len(chunk) for chunk, _ in self.kept.values())
        return TierUsage(1 << 30, used, len(self.kept))


class Bench:
    """A manager over one tier of a class, and that tier."""

    def __init__(self, tier: type[Plain], *, slots: int = 4, **fields: Any) -> None:
        tier.made = []
        kind = f"{tier.__name__}-{next(_names)}"
        kvtier.register_tier(kind, tier)
        patient = {"high_water_s_per_mib": 1e9, "load_share": 1.0}
        config = {"type": kind, "name": "plain", **patient, **fields}
        region = kvtier.Region(slots, 4096)
        self.manager = kvtier.Manager(region, [config], key_bytes=KEY_BYTES, events=True)
        self.rows = np.asarray(region)
        (self.tier,) = tier.made
        self.requests = itertools.count(1)

    @property
    def figures(self) -> dict[str, Any]:
        return dict(self.manager.stats()["tiers"]["plain"])

    @property
    def faults(self) -> dict[str, int]:
        """Those that were counted, by kind."""
        return {kind: times for kind, times in self.figures["faults"].items() if times}

    @property
    def load_failures(self) -> dict[str, int]:
        return {cause: times for cause, times in self.figures["load_failures"].items() if times}

    def held(self) -> tuple[int, int, int]:
        primary = self.manager.stats()["primary"]
        return primary["pinned"], primary["writing"], primary["detached"]

    def store(self, *numbers: int) -> None:
        """Stores chunks whose bytes are all their number."""
        request = next(self.requests)
        prepared = self.manager.prepare_store(request, keys(*numbers))
        assert prepared is not None
        for index, slot in zip(prepared.indices, prepared.slots, strict=True):
            self.rows[slot] = numbers[index]
        written = [keys(*numbers)[index] for index in prepared.indices]
        self.manager.complete_store(request, written)
        self.manager.request_finished(request)

    def until(self, holds: Callable[[], Any]) -> None:
        """Ends steps, as an engine does, until something holds."""
        end = time.monotonic() + PATIENCE_S
        while not holds():
            assert time.monotonic() < end, (self.figures, self.manager.stats()["primary"])
            self.manager.end_step()
            time.sleep(0.001)

    def settle(self) -> None:
        assert self.manager.drain(PATIENCE_S), self.figures

    def forget(self) -> None:
        self.settle()
        self.manager.reset()
        self.manager.reset_flushed()

    def ask(self, *numbers: int) -> list[int]:
        """Looks up until the tier has answered."""
        request = next(self.requests)
        answers: list[int] = []

        def known() -> bool:
            answers[:] = self.manager.lookup(request, keys(*numbers)).tolist()
            return RETRY not in answers

        self.until(known)
        return answers

    def bring(self, *numbers: int) -> list[int]:
        """Looks up and waits until the chunks came, HIT, or did not, MISS. Bytes must be right."""
        self.ask(*numbers)
        self.until(lambda: self.held()[1] == 0)
        request = next(self.requests)
        answers = []
        for number in numbers:
            try:
                (slot,) = self.manager.prepare_load(request, keys(number))
            except kvtier.errors.UnknownKeyError:
                answers.append(MISS)
                continue
            answers.append(HIT)
            assert (self.rows[slot] == number).all()
            self.manager.complete_load(request, keys(number))
        self.manager.request_finished(request)
        return answers

    def close(self) -> None:
        self.settle()
        self.manager.validate()
        assert self.held() == (0, 0, 0)
        self.manager.shutdown()
