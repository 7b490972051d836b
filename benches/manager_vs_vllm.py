"""The manager with two tiers from Python, beside vLLM's `TieringOffloadingManager`.

A request of 131,072 tokens has 8,192 chunks of 16 tokens. Half of them are known: a quarter in
the primary tier, a quarter in the second tier behind it; the other half is new. Both sides go
through the same life of such a request, turn by turn in one process, and all calls of the manager
are added up:

- look-up of all keys, end of the step (promotions are submitted), steps until they have come,
  look-up again: the known half is a hit
- prepare and complete the load of the known half
- prepare and complete the store of the new half, which evicts, and cascades to both tiers
- end of the request and of the step

Waiting for tiers is not timed. vLLM's tiers are two of its `ExampleSecondaryTierManager`, which
note keys and move nothing; kvtier's are two memory tiers, whose threads move every chunk
(4 KiB here) and verify its checksum on the way back, beside the calls that are timed.

`end_step` is one call with nothing to do; `stats` one snapshot of all figures.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from collections.abc import Callable
from typing import Any

from beside_vllm import Batch, Target, import_vllm, keys_of, record, report

import kvtier

KEYS = 8_192
SLOTS = 16_384
CHUNK = 4_096
TIERS = 2
CALLS = 2_000


class Request:
    """The chunks of one request: what is in the primary tier, in the second tier, and new."""

    def __init__(self, number: int) -> None:
        """Keys that no other request has."""
        self.number = number
        keys = keys_of(range(number * KEYS, (number + 1) * KEYS))
        quarter = KEYS // 4
        self.keys = keys
        self.resident, self.behind = keys[:quarter], keys[quarter : 2 * quarter]
        self.known, self.new = keys[: 2 * quarter], keys[2 * quarter :]
        # Fills the primary tier, and the first one behind it, with what nobody asks for.
        first = (1 << 32) + number * SLOTS
        self.filler = keys_of(range(first, first + SLOTS))


class Timer:
    """Adds up what calls take."""

    def __init__(self) -> None:
        """Nothing yet."""
        self.nanoseconds = 0

    def __call__(self, verb: Callable[..., Any], *arguments: Any) -> Any:
        """Calls `verb`, timed."""
        start = time.perf_counter_ns()
        answer = verb(*arguments)
        self.nanoseconds += time.perf_counter_ns() - start
        return answer


class Ours:
    """`kvtier.Manager` with two memory tiers, of which only the second keeps what leaves."""

    name = "kvtier"

    def __init__(self) -> None:
        """Two tiers; all of the queue bound is theirs, or stores would be shed and not timed."""
        region = kvtier.Region(SLOTS, CHUNK, prefault_threads=2)
        limits = {"max_queued_bytes": SLOTS * CHUNK, "high_water_s_per_mib": 60.0}
        tiers = [
            {"type": "memory", "name": name, "capacity_bytes": chunks * CHUNK, **limits}
            for name, chunks in (("small", 2 * KEYS), ("large", 16 * KEYS))
        ]
        self.manager = kvtier.Manager(region, tiers)
        self.others = iter(range(1 << 40, 1 << 41))

    def store(self, keys: Batch) -> None:
        """Has keys stored as a request of their own, not timed."""
        request = next(self.others)
        assert self.manager.prepare_store(request, keys) is not None
        self.manager.complete_store(request, keys)
        self.manager.request_finished(request)
        assert self.manager.drain(60)

    def prepare(self, request: Request) -> None:
        """`behind` only in a tier, `resident` in the primary one."""
        self.store(request.behind)
        self.store(request.filler)
        self.store(request.resident)

    def run(self, request: Request, timer: Timer) -> None:
        """The timed life of a request."""
        manager, number = self.manager, request.number
        timer(manager.lookup_prefix, number, request.keys)
        timer(manager.end_step)
        while (
            manager.stats()["tiers"]["large"]["loads_in_flight"]
            + (manager.stats()["tiers"]["small"]["loads_in_flight"])
        ):
            manager.wait(60.0)
            timer(manager.end_step)
        answers = timer(manager.lookup_prefix, number, request.keys)
        assert len(answers) == len(request.known)
        assert (answers == kvtier.HIT).all()
        timer(manager.prepare_load, number, request.known)
        timer(manager.complete_load, number, request.known)
        prepared = timer(manager.prepare_store, number, request.new)
        assert len(prepared.slots) == len(request.new)
        timer(manager.complete_store, number, request.new)
        timer(manager.request_finished, number)
        timer(manager.end_step)
        assert manager.drain(60)

    def idle_step(self) -> None:
        """A step with nothing to do."""
        self.manager.end_step()

    def stats(self) -> None:
        """All figures."""
        self.manager.stats()


class NoRegion:
    """What vLLM's primary tier asks of its mapping: a view, and nothing to clean up."""

    def create_kv_memoryview(self) -> memoryview:
        """Shape (slots, chunk bytes), never touched."""
        return memoryview(bytearray(SLOTS * CHUNK)).cast("b", (SLOTS, CHUNK))

    def cleanup(self) -> None:
        """Nothing."""


class Theirs:
    """`vllm.v1.kv_offload.tiering.manager.TieringOffloadingManager` with two example tiers."""

    name = "vLLM"

    def __init__(self, vllm: dict[str, Any]) -> None:
        """Tiers that note keys and complete at once."""
        self.vllm = vllm
        primary = vllm["tiering"].CPUPrimaryTierOffloadingManager(SLOTS, NoRegion())
        view = primary.get_kv_memoryview()
        example = vllm["example"].ExampleSecondaryTierManager
        self.tiers = [example(None, view, f"example{number}") for number in range(TIERS)]
        self.manager = vllm["tiering"].TieringOffloadingManager(primary, self.tiers)
        self.HIT = vllm["base"].LookupResult.HIT
        self.PENDING = vllm["base"].LookupResult.HIT_PENDING
        self.MISS = vllm["base"].LookupResult.MISS
        self.step = vllm["base"].ScheduleEndContext(new_req_ids=(), preempted_req_ids=())
        self.others = iter(range(1 << 40, 1 << 41))

    def begin(self, number: int) -> Any:
        """A request as vLLM knows it."""
        context = self.vllm["base"].ReqContext(req_id=str(number))
        self.manager.on_new_request(context)
        return context

    def store(self, keys: Batch) -> None:
        """Has keys stored as a request of their own, not timed."""
        context = self.begin(next(self.others))
        assert self.manager.prepare_store(keys, context) is not None
        self.manager.complete_store(keys, context)
        self.manager.on_request_finished(context)
        self.manager.on_schedule_end(self.step)

    def prepare(self, request: Request) -> None:
        """`behind` only in the second tier, `resident` in the primary one."""
        self.store(request.behind)
        self.store(request.filler)
        self.store(request.resident)
        for key in request.behind:
            del self.tiers[0].chunks[key]

    def lookup(self, keys: Batch, context: Any) -> list[Any]:
        """Key by key up to the first miss, as its scheduler does: there are no batches."""
        answers = []
        for key in keys:
            answer = self.manager.lookup(key, context)
            if answer is self.MISS:
                break
            answers.append(answer)
        return answers

    def run(self, request: Request, timer: Timer) -> None:
        """The timed life of a request."""
        manager, context = self.manager, self.begin(request.number)
        timer(self.lookup, request.keys, context)
        timer(manager.on_schedule_end, self.step)
        timer(manager.on_schedule_end, self.step)
        answers = timer(self.lookup, request.keys, context)
        assert len(answers) == len(request.known)
        assert all(answer is self.HIT for answer in answers)
        timer(manager.prepare_load, request.known, context)
        timer(manager.complete_load, request.known, context)
        prepared = timer(manager.prepare_store, request.new, context)
        assert len(prepared.keys_to_store) == len(request.new)
        timer(manager.complete_store, request.new, context)
        timer(manager.on_request_finished, context)
        timer(manager.on_schedule_end, self.step)

    def idle_step(self) -> None:
        """A step with nothing to do."""
        self.manager.on_schedule_end(self.step)

    def stats(self) -> None:
        """All figures."""
        self.manager.get_stats()


TARGETS = {
    "request": ("ms", Target(value=3.0)),
    "request beside vLLM": ("ms", Target(ratio=20)),
    "idle end_step": ("us", Target(value=2.0)),
    "stats": ("us", Target()),
}


def microseconds(call: Callable[[], None]) -> float:
    """The mean of many calls."""
    start = time.perf_counter_ns()
    for _ in range(CALLS):
        call()
    return (time.perf_counter_ns() - start) / CALLS / 1e3


def measure(sides: list[Ours | Theirs], rounds: int) -> dict[str, dict[str, list[float]]]:
    """Figures of every round: by name, then by side."""
    figures: dict[str, dict[str, list[float]]] = {
        name: {side.name: [] for side in sides} for name in TARGETS
    }
    for number in range(1, rounds + 1):
        for side in sides if number % 2 == 0 else reversed(sides):
            request = Request(number)
            side.prepare(request)
            gc.collect()
            timer = Timer()
            side.run(request, timer)
            for name in ("request", "request beside vLLM"):
                figures[name][side.name].append(timer.nanoseconds / 1e6)
            figures["idle end_step"][side.name].append(microseconds(side.idle_step))
            figures["stats"][side.name].append(microseconds(side.stats))
    return figures


def main() -> int:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=7, help="default %(default)s")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    arguments = parser.parse_args()
    if arguments.rounds < 1:
        parser.error("use 1 round or more")
    vllm = import_vllm(
        {
            "tiering": "vllm.v1.kv_offload.tiering.manager",
            "example": "vllm.v1.kv_offload.tiering.example.manager",
            "base": "vllm.v1.kv_offload.base",
        }
    )
    sides: list[Ours | Theirs] = [Ours()]
    if vllm is not None:
        sides.append(Theirs(vllm))
    measured = measure(sides, arguments.rounds)
    figures = [
        record(
            f"manager.{name.replace(' ', '_')}",
            TARGETS[name][0],
            by_side[Ours.name],
            by_side.get(Theirs.name),
            TARGETS[name][1],
            "vLLM TieringOffloadingManager",
        )
        for name, by_side in measured.items()
    ]
    report(f"two tiers, {arguments.rounds} rounds, median", figures, vllm, as_json=arguments.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
