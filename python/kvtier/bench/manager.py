"""The manager with two tiers from Python, beside vLLM's `TieringOffloadingManager`.

A request has `keys` chunks; with 8,192 of 16 tokens that is a prompt of 131,072 tokens. Half of
them are known: a quarter in the primary tier, a quarter in the second tier behind it; the other
half is new. Both sides go through the same life of such a request, turn by turn, and all calls of
the manager are added up (`manager.request`):

- look-up of all keys, end of the step (promotions are submitted), steps until they have come,
  look-up again: the known half is a hit
- prepare and complete the load of the known half
- prepare and complete the store of the new half, which evicts, and cascades to both tiers
- end of the request and of the step

Waiting for tiers is not timed. vLLM's tiers are two of its `ExampleSecondaryTierManager`, which
note keys and move nothing; kvtier's are two memory tiers, whose threads move every chunk
(4 KiB here) and verify its checksum on the way back, beside the calls that are timed.

`manager.idle_step` is one end of a step with nothing to do, `manager.stats` one snapshot of all
figures.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from itertools import count
from types import SimpleNamespace
from typing import Any, Protocol

import kvtier
from kvtier.bench.beside_vllm import (
    Batch,
    alone_and_beside,
    import_vllm,
    numbered_hashes,
    require,
)
from kvtier.bench.figures import Figure, alternate
from kvtier.errors import ConfigError

__all__ = ["measure"]

_CHUNK = 4_096
_CALLS = 2_000
_TIERS = 2
_WAIT = 60.0
_REFERENCE = "vLLM TieringOffloadingManager"
# A request of so many keys has a limit of its own; other numbers have none.
_KEYS_OF_LIMIT = 8_192
_LIMIT_MS = 3.0


def measure(*, keys: int, rounds: int) -> Iterator[Figure]:
    """Yields the figures of requests of `keys` chunks. Raises `ConfigError` for too few."""
    if keys < 4:
        raise ConfigError(f"--keys {keys}: a request has a known and a new part; ask for 4 or more")
    vllm = import_vllm(
        {
            "tiering": "vllm.v1.kv_offload.tiering.manager",
            "example": "vllm.v1.kv_offload.tiering.example.manager",
            "base": "vllm.v1.kv_offload.base",
        }
    )
    sides: list[_Side] = [_Ours(keys)]
    if vllm is not None:
        sides.append(_Theirs(vllm, keys))
    try:
        lives = alternate(rounds, *(_life(side, keys) for side in sides))
        yield from alone_and_beside(
            "manager.request",
            "ms",
            lives[0],
            lives[1] if len(lives) > 1 else None,
            reference=_REFERENCE,
            limit=_LIMIT_MS if keys == _KEYS_OF_LIMIT else None,
            ratio_limit=1 / 20,
        )
        for name, limit in (("idle_step", 2.0), ("stats", None)):
            taken = alternate(rounds, *(_microseconds(getattr(side, name)) for side in sides))
            yield from alone_and_beside(
                f"manager.{name}",
                "us",
                taken[0],
                taken[1] if len(taken) > 1 else None,
                reference=_REFERENCE,
                limit=limit,
            )
    finally:
        sides[0].shutdown()


def _life(side: _Side, keys: int) -> Callable[[], float]:
    numbers = count(1)

    def take() -> float:
        request = _Request(next(numbers), keys)
        side.prepare(request)
        gc.collect()
        timer = _Timer()
        side.run(request, timer)
        return timer.nanoseconds / 1e6

    return take


def _microseconds(call: Callable[[], None]) -> Callable[[], float]:
    """The mean of many calls."""

    def take() -> float:
        start = time.perf_counter_ns()
        for _ in range(_CALLS):
            call()
        return (time.perf_counter_ns() - start) / _CALLS / 1e3

    return take


class _Request:
    """The chunks of one request: what is in the primary tier, in the second tier, and new."""

    def __init__(self, number: int, keys: int) -> None:
        """Keys that no other request has."""
        self.number = number
        self.keys = numbered_hashes(number * keys, keys)
        quarter = keys // 4
        self.resident, self.behind = self.keys[:quarter], self.keys[quarter : 2 * quarter]
        self.known, self.new = self.keys[: 2 * quarter], self.keys[2 * quarter :]
        # Fills the primary tier, and the first one behind it, with what nobody asks for.
        slots = 2 * keys
        self.filler = numbered_hashes((1 << 32) + number * slots, slots)


class _Timer:
    """Adds up what calls take."""

    def __init__(self) -> None:
        self.nanoseconds = 0

    def __call__(self, verb: Callable[..., Any], *arguments: Any) -> Any:
        """Calls `verb`, timed."""
        start = time.perf_counter_ns()
        answer = verb(*arguments)
        self.nanoseconds += time.perf_counter_ns() - start
        return answer


class _Side(Protocol):
    """One side of the comparison."""

    def prepare(self, request: _Request) -> None:
        """Puts `behind` only into the second tier, and `resident` into the primary one."""

    def run(self, request: _Request, timer: _Timer) -> None:
        """The timed life of a request."""

    def idle_step(self) -> None:
        """Ends a step with nothing to do."""

    def stats(self) -> None:
        """Takes all figures."""

    def shutdown(self) -> None:
        """Ends what was started."""


class _Ours(_Side):
    """`kvtier.Manager` with two memory tiers, of which only the second keeps what leaves."""

    def __init__(self, keys: int) -> None:
        # All of the queue bound is theirs, or stores would be shed and not timed.
        slots = 2 * keys
        region = kvtier.Region(slots, _CHUNK, prefault_threads=2)
        limits = {"max_queued_bytes": slots * _CHUNK, "high_water_s_per_mib": _WAIT}
        tiers = [
            {"type": "memory", "name": name, "capacity_bytes": chunks * _CHUNK, **limits}
            for name, chunks in (("small", 2 * keys), ("large", 16 * keys))
        ]
        self.manager = kvtier.Manager(region, tiers)
        self.others = count(1 << 40)

    def _store(self, keys: Batch) -> None:
        """Has keys stored as a request of their own, not timed."""
        request = next(self.others)
        require(self.manager.prepare_store(request, keys) is not None)
        self.manager.complete_store(request, keys)
        self.manager.request_finished(request)
        require(self.manager.drain(_WAIT))

    def prepare(self, request: _Request) -> None:
        for keys in (request.behind, request.filler, request.resident):
            self._store(keys)

    def run(self, request: _Request, timer: _Timer) -> None:
        manager, number = self.manager, request.number
        timer(manager.lookup_prefix, number, request.keys)
        timer(manager.end_step)
        while any(tier["loads_in_flight"] for tier in manager.stats()["tiers"].values()):
            manager.wait(_WAIT)
            timer(manager.end_step)
        answers = timer(manager.lookup_prefix, number, request.keys)
        require(len(answers) == len(request.known) and bool((answers == kvtier.HIT).all()))
        timer(manager.prepare_load, number, request.known)
        timer(manager.complete_load, number, request.known)
        prepared = timer(manager.prepare_store, number, request.new)
        require(len(prepared.slots) == len(request.new))
        timer(manager.complete_store, number, request.new)
        timer(manager.request_finished, number)
        timer(manager.end_step)
        require(manager.drain(_WAIT))

    def idle_step(self) -> None:
        self.manager.end_step()

    def stats(self) -> None:
        self.manager.stats()

    def shutdown(self) -> None:
        self.manager.shutdown()


class _NoRegion:
    """What vLLM's primary tier asks of its mapping: a view, and nothing to clean up."""

    def __init__(self, slots: int) -> None:
        self.slots = slots

    def create_kv_memoryview(self) -> memoryview:
        """Shape (slots, chunk bytes), never touched."""
        return memoryview(kvtier.Region(self.slots, _CHUNK))

    def cleanup(self) -> None:
        """Nothing."""


class _Theirs(_Side):
    """vLLM's manager with two example tiers, which note keys and complete at once."""

    def __init__(self, vllm: SimpleNamespace, keys: int) -> None:
        self.base = vllm.base
        primary = vllm.tiering.CPUPrimaryTierOffloadingManager(2 * keys, _NoRegion(2 * keys))
        view = primary.get_kv_memoryview()
        example = vllm.example.ExampleSecondaryTierManager
        self.tiers = [example(None, view, f"example{number}") for number in range(_TIERS)]
        self.manager = vllm.tiering.TieringOffloadingManager(primary, self.tiers)
        self.step = vllm.base.ScheduleEndContext(new_req_ids=(), preempted_req_ids=())
        self.others = count(1 << 40)

    def _begin(self, number: int) -> Any:
        """A request as vLLM knows it."""
        context = self.base.ReqContext(req_id=str(number))
        self.manager.on_new_request(context)
        return context

    def _store(self, keys: Batch) -> None:
        """Has keys stored as a request of their own, not timed."""
        context = self._begin(next(self.others))
        require(self.manager.prepare_store(keys, context) is not None)
        self.manager.complete_store(keys, context)
        self.manager.on_request_finished(context)
        self.manager.on_schedule_end(self.step)

    def prepare(self, request: _Request) -> None:
        for keys in (request.behind, request.filler, request.resident):
            self._store(keys)
        for key in request.behind:
            del self.tiers[0].chunks[key]

    def _lookup(self, keys: Batch, context: Any) -> list[Any]:
        """Key by key up to the first miss, as its scheduler does: there are no batches."""
        answers = []
        for key in keys:
            answer = self.manager.lookup(key, context)
            if answer is self.base.LookupResult.MISS:
                break
            answers.append(answer)
        return answers

    def run(self, request: _Request, timer: _Timer) -> None:
        manager, context = self.manager, self._begin(request.number)
        timer(self._lookup, request.keys, context)
        timer(manager.on_schedule_end, self.step)
        timer(manager.on_schedule_end, self.step)
        answers = timer(self._lookup, request.keys, context)
        hit = self.base.LookupResult.HIT
        require(len(answers) == len(request.known) and all(answer is hit for answer in answers))
        timer(manager.prepare_load, request.known, context)
        timer(manager.complete_load, request.known, context)
        prepared = timer(manager.prepare_store, request.new, context)
        require(len(prepared.keys_to_store) == len(request.new))
        timer(manager.complete_store, request.new, context)
        timer(manager.on_request_finished, context)
        timer(manager.on_schedule_end, self.step)

    def idle_step(self) -> None:
        self.manager.on_schedule_end(self.step)

    def stats(self) -> None:
        self.manager.get_stats()

    def shutdown(self) -> None:
        pass
