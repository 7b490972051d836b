"""A small engine: stores known bytes, brings them back, and compares."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvtier._kvtier import HIT, RETRY, Manager, Region

__all__ = ["KEY_BYTES", "PATIENCE_S", "STEP_S", "Engine", "batches", "content", "key"]

KEY_BYTES = 16
# Long enough for any machine: what takes longer hangs.
PATIENCE_S = 60.0
# The time between two steps of the engine while a tier is asked.
STEP_S = 0.001

# Nothing may be refused for being slow: whether a tier is fast is not what is tested.
_PATIENT: Mapping[str, Any] = {
    "load_deadline_s": PATIENCE_S,
    "store_deadline_s": PATIENCE_S,
    "lookup_deadline_s": PATIENCE_S,
    "load_share": 1.0,
    "max_queued_bytes": 1 << 40,
    "high_water_s_per_mib": 1e9,
    "breaker_failures": 0,
}


def key(number: int) -> bytes:
    """Gives the key of a chunk."""
    return number.to_bytes(KEY_BYTES, "big")


def content(number: int, chunk_bytes: int) -> NDArray[np.uint8]:
    """Gives the bytes of a chunk: other ones for every number."""
    return np.random.default_rng(number).integers(0, 256, chunk_bytes, np.uint8)


class Engine:
    """A manager over one tier, and an engine that plays with it. A chunk is a number."""

    def __init__(
        self,
        config: Mapping[str, Any],
        *,
        slots: int,
        chunk_bytes: int = 4096,
        namespace: str = "conformance",
    ) -> None:
        region = Region(slots, chunk_bytes, kind="anonymous")
        self.chunk_bytes = region.slot_bytes
        self.manager = Manager(
            region,
            [{**_PATIENT, **config}],
            key_bytes=KEY_BYTES,
            namespace=namespace,
            events=True,
        )
        self._rows = np.asarray(region)
        self._requests = itertools.count(1)

    @property
    def tier(self) -> dict[str, Any]:
        """The figures of the tier."""
        (figures,) = self.manager.stats()["tiers"].values()
        return dict(figures)

    def store(self, numbers: Sequence[int]) -> None:
        """Stores chunks, on their way to the tier afterwards."""
        request = next(self._requests)
        prepared = self.manager.prepare_store(request, [key(number) for number in numbers])
        assert prepared is not None, "the primary tier has no room: use more slots"
        written = [numbers[index] for index in prepared.indices]
        for number, slot in zip(written, prepared.slots, strict=True):
            self._rows[slot] = content(number, self.chunk_bytes)
        self.manager.complete_store(request, [key(number) for number in written])
        self.manager.request_finished(request)

    def settle(self) -> None:
        """Waits until no job is under way."""
        assert self.manager.drain(PATIENCE_S), f"jobs hang: {self.tier}"

    def forget(self) -> None:
        """Empties the primary tier: what comes back from now on comes from the tier."""
        self.settle()
        self.manager.reset()
        self.manager.reset_flushed()

    def ask(self, numbers: Sequence[int]) -> list[int]:
        """Looks chunks up until the tier knows; promotions are queued, and not submitted."""
        request = next(self._requests)
        end = time.monotonic() + PATIENCE_S
        while True:
            answers = self.manager.lookup(request, [key(number) for number in numbers]).tolist()
            if RETRY not in answers:
                return [int(answer) for answer in answers]
            assert time.monotonic() < end, "the tier says RETRY without end"
            time.sleep(STEP_S)

    def bring(self, numbers: Sequence[int]) -> list[int]:
        """Brings chunks back and compares their bytes. Returns those that came."""
        self.ask(numbers)
        self.settle()
        return self.compare(numbers)

    def compare(self, numbers: Sequence[int]) -> list[int]:
        """Compares the chunks that are in the primary tier. Returns them."""
        request = next(self._requests)
        answers = self.manager.lookup(request, [key(number) for number in numbers]).tolist()
        came = [number for number, answer in zip(numbers, answers, strict=True) if answer == HIT]
        slots = self.manager.prepare_load(request, [key(number) for number in came])
        for number, slot in zip(came, slots, strict=True):
            same = (self._rows[slot] == content(number, self.chunk_bytes)).all()
            assert same, f"chunk {number} came back with other bytes"
        self.manager.complete_load(request, [key(number) for number in came])
        self.manager.request_finished(request)
        return came

    def removed(self) -> list[int]:
        """Gives the chunks that the tier evicted since the last call."""
        events = self.manager.take_events()
        return [
            int.from_bytes(gone, "big")
            for kind, tier, keys in events
            if kind == "removed" and tier != "primary"
            for gone in keys
        ]

    def close(self) -> None:
        """Shuts down, and checks that nothing is left over."""
        self.settle()
        self.manager.validate()
        self.manager.shutdown()
        self.check_closed()

    def check_closed(self) -> None:
        """Checks that no slot, pin or job is left, and that the tier kept the contract."""
        stats = self.manager.stats()
        left = {name: stats["primary"][name] for name in ("pinned", "writing", "detached")}
        assert not any(left.values()), f"slots are held: {left}"
        tier = self.tier
        under_way = {name: tier[name] for name in ("loads_in_flight", "stores_in_flight")}
        assert not any(under_way.values()), f"jobs are left: {under_way}"
        assert tier["queued_bytes"] == 0
        assert not any(tier["faults"].values()), f"the contract was broken: {tier['faults']}"


def batches(numbers: Iterable[int], size: int) -> Iterable[list[int]]:
    """Gives the numbers in lists of `size`."""
    items = iter(numbers)
    while batch := list(itertools.islice(items, size)):
        yield batch
