"""The primary tier's index from Python, beside vLLM's `CPUOffloadingManager`.

Both hold 100,000 keys of 36 bytes and get the same batches of 128, turn by turn in one process
(A B, B A, A B ...), each batch as a request of its own. A round's figure is its mean over the
batches; printed are the median, least and greatest of the rounds, in ns a key:

- lookup: is every key of a batch there? vLLM is asked key by key: it has no batches.
- array lookup: the same with the keys in one array of numpy, which only kvtier takes.
- single lookup: one call a key, on both sides.
- load cycle: `prepare_load` and `complete_load` of resident keys.
- store cycle: `prepare_store` and `complete_store` of new keys, each of which evicts another.

The keys of a batch were stored together, as those of a prefix are; batches come in random order.
Beginning and ending a request is not timed, on either side. Without vLLM (`make bench-vllm`
installs it) kvtier is measured alone.
"""

from __future__ import annotations

import argparse
import gc
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any, Protocol

import numpy as np
from beside_vllm import Batch, Target, import_vllm, keys_of, record, report
from numpy.typing import NDArray

import kvtier
from kvtier._kvtier import POLICIES

ENTRIES = 100_000
BATCH = 128
COMPARED_POLICIES = ("lru", "arc")

Verb = Callable[[int, Batch], int]
"""Does its work for a request and a batch; returns the nanoseconds that took."""


class Index(Protocol):
    """One side of the comparison."""

    name: str

    def verbs(self) -> dict[str, Verb]:
        """What is measured, by name."""


class Ours:
    """`kvtier.Manager` without secondary tiers."""

    name = "kvtier"

    def __init__(self, policy: str) -> None:
        # Its pages are never touched, so the region takes no memory.
        self.manager = kvtier.Manager(kvtier.Region(ENTRIES, 4096), policy=policy)

    def verbs(self) -> dict[str, Verb]:
        return {
            "lookup": self.lookup,
            "array lookup": self.lookup_array,
            "single lookup": self.lookup_single,
            "load cycle": self.load,
            "store cycle": self.store,
        }

    def lookup(self, request: int, keys: Batch) -> int:
        return self._lookup(request, keys)

    def _lookup(self, request: int, keys: Batch | NDArray[np.uint8]) -> int:
        start = time.perf_counter_ns()
        found = self.manager.lookup(request, keys)
        end = time.perf_counter_ns()
        assert (found == kvtier.HIT).all()
        self.manager.request_finished(request)
        return end - start

    def lookup_array(self, request: int, keys: Batch) -> int:
        array = np.frombuffer(b"".join(keys), np.uint8).reshape(len(keys), -1)
        return self._lookup(request, array)

    def lookup_single(self, request: int, keys: Batch) -> int:
        lookup = self.manager.lookup_key
        start = time.perf_counter_ns()
        for key in keys:
            lookup(request, key)
        end = time.perf_counter_ns()
        self.manager.request_finished(request)
        return end - start

    def load(self, request: int, keys: Batch) -> int:
        start = time.perf_counter_ns()
        slots = self.manager.prepare_load(request, keys)
        self.manager.complete_load(request, keys)
        end = time.perf_counter_ns()
        assert len(slots) == len(keys)
        self.manager.request_finished(request)
        return end - start

    def store(self, request: int, keys: Batch) -> int:
        start = time.perf_counter_ns()
        prepared = self.manager.prepare_store(request, keys)
        self.manager.complete_store(request, keys)
        end = time.perf_counter_ns()
        assert prepared is not None
        assert len(prepared.slots) == len(keys)
        self.manager.request_finished(request)
        return end - start


class Theirs:
    """`vllm.v1.kv_offload.cpu.manager.CPUOffloadingManager`."""

    name = "vLLM"

    def __init__(self, vllm: SimpleNamespace, policy: str) -> None:
        self.vllm = vllm
        self.manager = vllm.CPUOffloadingManager(ENTRIES, cache_policy=policy)

    def verbs(self) -> dict[str, Verb]:
        return {
            "lookup": self.lookup,
            "single lookup": self.lookup,
            "load cycle": self.load,
            "store cycle": self.store,
        }

    def _begin(self, request: int) -> Any:
        context = self.vllm.ReqContext(req_id=str(request))
        self.manager.on_new_request(context)
        return context

    def lookup(self, request: int, keys: Batch) -> int:
        context, lookup = self._begin(request), self.manager.lookup
        start = time.perf_counter_ns()
        found = [lookup(key, context) for key in keys]
        end = time.perf_counter_ns()
        assert all(answer is self.vllm.HIT for answer in found)
        self.manager.on_request_finished(context)
        return end - start

    def load(self, request: int, keys: Batch) -> int:
        context = self._begin(request)
        start = time.perf_counter_ns()
        spec = self.manager.prepare_load(keys, context)
        self.manager.complete_load(keys, context)
        end = time.perf_counter_ns()
        assert len(spec.chunk_ids) == len(keys)
        self.manager.on_request_finished(context)
        return end - start

    def store(self, request: int, keys: Batch) -> int:
        context = self._begin(request)
        start = time.perf_counter_ns()
        prepared = self.manager.prepare_store(keys, context)
        self.manager.complete_store(keys, context)
        end = time.perf_counter_ns()
        assert prepared is not None
        assert len(prepared.keys_to_store) == len(keys)
        self.manager.on_request_finished(context)
        return end - start


TARGETS = {
    "lookup": Target(value=60),
    "array lookup": Target(value=60),
    "single lookup": Target(value=150),
    "load cycle": Target(ratio=30),
    "store cycle": Target(ratio=30),
}


def batches_of(keys: Batch) -> list[Batch]:
    return [keys[at : at + BATCH] for at in range(0, len(keys) - BATCH + 1, BATCH)]


def import_classes() -> SimpleNamespace | None:
    """The classes that are measured."""
    vllm = import_vllm(
        {"manager": "vllm.v1.kv_offload.cpu.manager", "base": "vllm.v1.kv_offload.base"}
    )
    if vllm is None:
        return None
    return SimpleNamespace(
        CPUOffloadingManager=vllm["manager"].CPUOffloadingManager,
        ReqContext=vllm["base"].ReqContext,
        HIT=vllm["base"].LookupResult.HIT,
        version=vllm["version"],
    )


def measure(
    sides: Sequence[Index], rounds: int, batches: int, requests: Iterator[int]
) -> dict[str, dict[str, list[float]]]:
    """Nanoseconds a key of every round: by verb, then by side."""
    order = random.Random(20)
    resident = keys_of(range(ENTRIES))
    fill = [resident[at : at + BATCH] for at in range(0, ENTRIES, BATCH)]
    verbs = {side.name: side.verbs() for side in sides}
    for side in sides:
        for batch in fill:
            verbs[side.name]["store cycle"](next(requests), batch)
    figures: dict[str, dict[str, list[float]]] = {
        verb: {side.name: [] for side in sides if verb in verbs[side.name]} for verb in TARGETS
    }
    new = ENTRIES
    # Stores last: until then all sides hold the same keys.
    for verb, by_side in figures.items():
        for number in range(rounds):
            if verb == "store cycle":
                work = batches_of(keys_of(range(new, new + batches * BATCH)))
                new += batches * BATCH
            else:
                work = order.sample(batches_of(resident), batches)
            turns = sides if number % 2 == 0 else list(reversed(sides))
            for side in turns:
                if side.name not in by_side:
                    continue
                gc.collect()
                run = verbs[side.name][verb]
                spent = sum(run(next(requests), batch) for batch in work)
                by_side[side.name].append(spent / (batches * BATCH))
    return figures


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=7, help="default %(default)s")
    parser.add_argument("--batches", type=int, default=100, help="of a round; default %(default)s")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    arguments = parser.parse_args()
    if arguments.rounds < 1 or not 1 <= arguments.batches <= ENTRIES // BATCH:
        parser.error(f"use 1 round or more, and 1 to {ENTRIES // BATCH} batches")
    vllm = import_classes()
    requests = iter(range(1, 1 << 62))
    figures = []
    for policy in COMPARED_POLICIES:
        if policy not in POLICIES:
            print(f"{policy}: this kvtier has no such policy, skipped", file=sys.stderr)
            continue
        sides: list[Index] = [Ours(policy)]
        if vllm is not None:
            sides.append(Theirs(vllm, policy))
        measured = measure(sides, arguments.rounds, arguments.batches, requests)
        figures += [
            record(
                f"index.{policy}.{verb.replace(' ', '_')}",
                "ns/key",
                by_side[Ours.name],
                by_side.get(Theirs.name),
                TARGETS[verb],
                "vLLM CPUOffloadingManager",
            )
            for verb, by_side in measured.items()
        ]
    title = f"{ENTRIES:,} keys, batches of {BATCH}, {arguments.rounds} rounds: ns a key, median"
    report(title, figures, None if vllm is None else vars(vllm), as_json=arguments.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
