"""The primary tier's index from Python, beside vLLM's `CPUOffloadingManager`, in ns a key.

Both hold the same keys of 36 bytes and get the same batches of 128, turn by turn, each batch as a
request of its own. The keys of a batch were stored together, as those of a prefix are; batches
come in random order. Beginning and ending a request is not timed, on either side.

- `lookup`: is every key of a batch there? vLLM is asked key by key: it has no batches.
- `array_lookup`: the same with the keys in one array of numpy, which only kvtier takes.
- `single_lookup`: one call a key, on both sides.
- `load_cycle`: `prepare_load` and `complete_load` of resident keys.
- `store_cycle`: `prepare_store` and `complete_store` of new keys, each of which evicts another.
"""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Callable, Iterator
from itertools import count
from types import SimpleNamespace
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

import kvtier
from kvtier.bench.beside_vllm import Batch, alone_and_beside, import_vllm, numbered_hashes, require
from kvtier.bench.figures import Figure, alternate
from kvtier.errors import ConfigError

__all__ = ["measure"]

_BATCH = 128
# Those that vLLM has as well.
_POLICIES = ("lru", "arc")
_REFERENCE = "vLLM CPUOffloadingManager"
_SEED = 20

_Verb = Callable[[int, Batch], int]
"""Does its work for a request and a batch; returns the nanoseconds that took."""

# Of each verb: nanoseconds a key, and the part of vLLM's time. Stores last: until then both
# sides hold the same keys.
_LIMITS: dict[str, tuple[float | None, float | None]] = {
    "lookup": (60.0, None),
    "array_lookup": (60.0, None),
    "single_lookup": (150.0, None),
    "load_cycle": (None, 1 / 30),
    "store_cycle": (None, 1 / 30),
}


def measure(*, keys: int, batches: int, rounds: int) -> Iterator[Figure]:
    """Yields the figures of an index that holds `keys` keys; a round is `batches` batches.

    Raises `ConfigError` when there are fewer batches than that.
    """
    if not 1 <= batches <= keys // _BATCH:
        raise ConfigError(
            f"--batches {batches}: {keys} keys are {keys // _BATCH} batches of {_BATCH}; "
            "ask for 1 to that many, or for more --keys"
        )
    vllm = import_vllm(
        {"manager": "vllm.v1.kv_offload.cpu.manager", "base": "vllm.v1.kv_offload.base"}
    )
    keys -= keys % _BATCH
    resident = _batches(numbered_hashes(0, keys))
    for policy in _POLICIES:
        sides: list[_Side] = [_Ours(policy, keys)]
        if vllm is not None:
            sides.append(_Theirs(vllm, policy, keys))
        for side in sides:
            store = side.verbs()["store_cycle"]
            for batch in resident:
                store(next(_requests), batch)
        for verb, (limit, ratio_limit) in _LIMITS.items():
            runs = [side.verbs()[verb] for side in sides if verb in side.verbs()]
            takes = [_take(run, _work(verb, resident, batches)) for run in runs]
            taken = alternate(rounds, *takes)
            yield from alone_and_beside(
                f"index.{policy}.{verb}",
                "ns",
                taken[0],
                taken[1] if len(taken) > 1 else None,
                reference=_REFERENCE,
                limit=limit,
                ratio_limit=ratio_limit,
            )


# Requests are numbered by the whole process: no two on one side are the same.
_requests = count(1)


def _take(run: _Verb, work: Iterator[list[Batch]]) -> Callable[[], float]:
    def take() -> float:
        batches = next(work)
        gc.collect()
        spent = sum(run(next(_requests), batch) for batch in batches)
        return spent / (len(batches) * _BATCH)

    return take


def _work(verb: str, resident: list[Batch], batches: int) -> Iterator[list[Batch]]:
    """The batches of each round; the same for every side."""
    if verb == "store_cycle":
        for first in count(len(resident) * _BATCH, batches * _BATCH):
            yield _batches(numbered_hashes(first, batches * _BATCH))
    order = random.Random(_SEED)
    while True:
        yield order.sample(resident, batches)


def _batches(keys: Batch) -> list[Batch]:
    return [keys[at : at + _BATCH] for at in range(0, len(keys), _BATCH)]


class _Side(Protocol):
    """One side of the comparison."""

    def verbs(self) -> dict[str, _Verb]:
        """What is measured, by name."""


class _Ours(_Side):
    """`kvtier.Manager` without secondary tiers."""

    def __init__(self, policy: str, keys: int) -> None:
        # Its pages are never touched, so the region takes no memory.
        self.manager = kvtier.Manager(kvtier.Region(keys, 4096), policy=policy)

    def verbs(self) -> dict[str, _Verb]:
        return {
            "lookup": self.lookup,
            "array_lookup": self.lookup_array,
            "single_lookup": self.lookup_single,
            "load_cycle": self.load,
            "store_cycle": self.store,
        }

    def lookup(self, request: int, keys: Batch | NDArray[np.uint8]) -> int:
        start = time.perf_counter_ns()
        found = self.manager.lookup(request, keys)
        end = time.perf_counter_ns()
        require(bool((found == kvtier.HIT).all()))
        self.manager.request_finished(request)
        return end - start

    def lookup_array(self, request: int, keys: Batch) -> int:
        return self.lookup(request, np.frombuffer(b"".join(keys), np.uint8).reshape(len(keys), -1))

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
        require(len(slots) == len(keys))
        self.manager.request_finished(request)
        return end - start

    def store(self, request: int, keys: Batch) -> int:
        start = time.perf_counter_ns()
        prepared = self.manager.prepare_store(request, keys)
        self.manager.complete_store(request, keys)
        end = time.perf_counter_ns()
        require(prepared is not None and len(prepared.slots) == len(keys))
        self.manager.request_finished(request)
        return end - start


class _Theirs(_Side):
    """`vllm.v1.kv_offload.cpu.manager.CPUOffloadingManager`."""

    def __init__(self, vllm: SimpleNamespace, policy: str, keys: int) -> None:
        self.base = vllm.base
        self.manager = vllm.manager.CPUOffloadingManager(keys, cache_policy=policy)

    def verbs(self) -> dict[str, _Verb]:
        return {
            "lookup": self.lookup,
            "single_lookup": self.lookup,
            "load_cycle": self.load,
            "store_cycle": self.store,
        }

    def _begin(self, request: int) -> Any:
        context = self.base.ReqContext(req_id=str(request))
        self.manager.on_new_request(context)
        return context

    def lookup(self, request: int, keys: Batch) -> int:
        context, lookup = self._begin(request), self.manager.lookup
        start = time.perf_counter_ns()
        found = [lookup(key, context) for key in keys]
        end = time.perf_counter_ns()
        require(all(answer is self.base.LookupResult.HIT for answer in found))
        self.manager.on_request_finished(context)
        return end - start

    def load(self, request: int, keys: Batch) -> int:
        context = self._begin(request)
        start = time.perf_counter_ns()
        spec = self.manager.prepare_load(keys, context)
        self.manager.complete_load(keys, context)
        end = time.perf_counter_ns()
        require(len(spec.chunk_ids) == len(keys))
        self.manager.on_request_finished(context)
        return end - start

    def store(self, request: int, keys: Batch) -> int:
        context = self._begin(request)
        start = time.perf_counter_ns()
        prepared = self.manager.prepare_store(keys, context)
        self.manager.complete_store(keys, context)
        end = time.perf_counter_ns()
        require(prepared is not None and len(prepared.keys_to_store) == len(keys))
        self.manager.on_request_finished(context)
        return end - start
