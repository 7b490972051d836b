"""Our manager beside vLLM's: the same calls, the same answers wherever the contract fixes them.

What it does not fix is which chunk is evicted. So there are two kinds of runs: with room for all,
where every answer must be equal, call by call; and without, where each manager is held to what the
contract says of its own answers.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any

import pytest
from tests.vllm.calls import SLOT, STEP, begin, flush, keys_of, scan
from tests.vllm.conftest import quiet_imports

import kvtier

with quiet_imports():
    from vllm.v1.kv_offload.base import (
        LookupResult,
        Medium,
        ReqContext,
        TierFilter,
        TierMatcher,
        make_offload_key,
    )
    from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager
    from vllm.v1.kv_offload.tiering.example.manager import ExampleSecondaryTierManager
    from vllm.v1.kv_offload.tiering.manager import (
        CPUPrimaryTierOffloadingManager,
        TieringOffloadingManager,
    )

    from kvtier.integrations.vllm.manager import KVTierOffloadingManager
    from kvtier.integrations.vllm.versions import ANNOUNCES_RESET_FLUSHED


class NoRegion:
    """What vLLM's primary tier wants of its mapping."""

    def __init__(self, slots: int) -> None:
        self.slots = slots

    def create_kv_memoryview(self) -> memoryview:
        return memoryview(bytearray(self.slots * SLOT)).cast("b", (self.slots, SLOT))

    def cleanup(self) -> None:
        pass


class Ours(KVTierOffloadingManager):
    """Ends each step only when its tiers are done, as vLLM's example tier is at once."""

    def on_schedule_end(self, context: Any) -> None:
        super().on_schedule_end(context)
        assert self.manager.drain(20)
        self.manager.validate()


def ours(slots: int, *, tier: bool = False) -> Any:
    tiers = [{"type": "memory", "capacity_bytes": 4 * slots * SLOT}] if tier else []
    return Ours(kvtier.Manager(kvtier.Region(slots, SLOT), tiers, events=True), events=True)


def vllm_host(slots: int) -> Any:
    return CPUOffloadingManager(slots, enable_events=True)


def vllm_tiers(slots: int) -> Any:
    primary = CPUPrimaryTierOffloadingManager(slots, NoRegion(slots), enable_events=True)
    tier = ExampleSecondaryTierManager(None, primary.get_kv_memoryview(), "example")
    return TieringOffloadingManager(primary, [tier])


@pytest.fixture
def manager() -> Iterator[Callable[..., Any]]:
    """Makes managers and shuts them down."""
    made: list[Any] = []

    def make(factory: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        made.append(factory(*arguments, **options))
        return made[-1]

    yield make
    for one in made:
        one.shutdown()


@dataclass
class Request:
    """A request as the scheduler drives it, with a context for every manager under test."""

    number: int
    keys: list[bytes]
    contexts: list[ReqContext]
    stores: list[list[set[bytes]]] = field(default_factory=list)
    loading: set[bytes] | None = None


class Scheduler:
    """Random calls that vLLM's scheduler may make, the same for all managers."""

    def __init__(self, managers: list[Any], seed: int) -> None:
        self.managers = managers
        self.rng = random.Random(seed)
        self.requests: list[Request] = []
        self.number = 0
        self.keys = [
            make_offload_key(bytes([prefix]) * 28 + position.to_bytes(4, "big"), group)
            for prefix in range(6)
            for group in range(2)
            for position in range(8)
        ]

    def call(self, verb: str, request: Request, *arguments: Any) -> list[Any]:
        return [
            getattr(manager, verb)(*arguments, context)
            for manager, context in zip(self.managers, request.contexts, strict=True)
        ]

    def begin(self) -> Request:
        self.number += 1
        start = self.rng.randrange(len(self.keys) // 8) * 8
        keys = self.keys[start : start + self.rng.randint(1, 8)]
        contexts = [ReqContext(str(self.number)) for _ in self.managers]
        request = Request(self.number, keys, contexts)
        for manager, context in zip(self.managers, contexts, strict=True):
            for position, key in enumerate(keys):
                context.set_offload_key_position(key, position + 1)
            manager.on_new_request(context)
        self.requests.append(request)
        return request

    def finish(self, request: Request) -> None:
        self.call("on_request_finished", request)
        while request.stores:
            self.complete_store(request)
        self.complete_load(request)
        self.requests.remove(request)

    def lookup(self, request: Request) -> list[list[LookupResult] | None]:
        """What vLLM's scan of a prefix makes of each manager's answers: the hits, or None when
        the request has to wait."""
        return [
            scan(manager, request.keys, context)
            for manager, context in zip(self.managers, request.contexts, strict=True)
        ]

    def prepare_store(self, request: Request) -> list[Any]:
        keys = self.rng.sample(request.keys, self.rng.randint(1, len(request.keys)))
        return self.call("prepare_store", request, keys)

    def complete_store(self, request: Request) -> None:
        batch = request.stores.pop(self.rng.randrange(len(request.stores)))
        # What did not succeed never comes from vLLM's scheduler, but its contract has it.
        success = self.rng.random() < 0.9
        for manager, context, keys in zip(self.managers, request.contexts, batch, strict=True):
            manager.complete_store(keys, context, success)

    def complete_load(self, request: Request) -> None:
        if request.loading is not None:
            self.call("complete_load", request, request.loading)
            request.loading = None

    def reset(self) -> None:
        """The connector forgets its jobs, and what has finished."""
        for request in self.requests:
            request.stores.clear()
            request.loading = None
        for manager in self.managers:
            manager.reset_cache()

    def end_step(self) -> None:
        for manager in self.managers:
            manager.on_schedule_end(STEP)


def events_of(manager: Any) -> Counter[tuple[bool, bytes]]:
    """What host memory got and lost; nobody fixes how keys are grouped. What 0.33 notes of stores
    that failed is for itself."""
    return Counter(
        (event.removed, key)
        for event in manager.take_events()
        if event.ownership is None and not getattr(event, "metadata_only", False)
        for key in event.keys
    )


def assert_same_events(scheduler: Scheduler, seen: list[Counter[tuple[bool, bytes]]]) -> None:
    for events, one in zip(seen, scheduler.managers, strict=True):
        events.update(events_of(one))
    assert seen[0] == seen[1]


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize(("theirs", "tier"), [(vllm_host, False), (vllm_tiers, True)])
def test_equal_answers_while_there_is_room(
    manager: Callable[..., Any], theirs: Callable[[int], Any], tier: bool, seed: int
) -> None:
    """Every answer, every event; resets leave chunks in tiers, from where they come back."""
    slots = 128
    scheduler = Scheduler([manager(ours, slots, tier=tier), manager(theirs, slots)], seed)
    pick, rng = scheduler.rng.choice, scheduler.rng
    resets = 0
    seen = [Counter[tuple[bool, bytes]](), Counter[tuple[bool, bytes]]()]
    for _ in range(600):
        verb = rng.choices(
            ["begin", "lookup", "store", "stored", "load", "loaded", "finish", "step", "reset"],
            [3, 6, 6, 6, 4, 4, 2, 4, 0.3],
        )[0]
        if verb == "begin" or not scheduler.requests:
            scheduler.begin()
            continue
        request = pick(scheduler.requests)
        match verb:
            case "lookup":
                mine, other = scheduler.lookup(request)
                assert mine == other
            case "store":
                mine, other = scheduler.prepare_store(request)
                assert mine.keys_to_store == other.keys_to_store
                assert mine.evicted_keys == other.evicted_keys == []
                slots_given = mine.store_spec.block_ids
                assert len(slots_given) == len(other.store_spec.block_ids)
                assert len(set(slots_given.tolist())) == len(mine.keys_to_store)
                if mine.keys_to_store:
                    request.stores.append([set(mine.keys_to_store)] * 2)
            case "stored" if request.stores:
                scheduler.complete_store(request)
            case "load" if request.loading is None:
                found = scheduler.lookup(request)[0]
                hits = request.keys[: len(found or ())]
                if hits:
                    mine, other = scheduler.call("prepare_load", request, hits)
                    assert len(mine.block_ids) == len(other.block_ids) == len(hits)
                    request.loading = set(hits)
            case "loaded":
                scheduler.complete_load(request)
            case "finish":
                scheduler.finish(request)
            case "step":
                scheduler.end_step()
            case "reset":
                resets += 1
                # Theirs takes what a tier has done at the beginning of the next step.
                scheduler.end_step()
                scheduler.end_step()
                assert_same_events(scheduler, seen)
                scheduler.reset()
                # Theirs forgets without an event; ours says what it forgot.
                [events_of(one) for one in scheduler.managers]
                flush(*scheduler.managers)
        for events, one in zip(seen, scheduler.managers, strict=True):
            events.update(events_of(one))
    assert scheduler.number > 40
    assert resets


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("make", [ours, vllm_host])
def test_the_contract_holds_without_room(
    manager: Callable[..., Any], make: Callable[[int], Any], seed: int
) -> None:
    """A store evicts as many chunks as it must, none in use or of its own, or does nothing."""
    slots = 12
    one = manager(make, slots)
    scheduler = Scheduler([one], seed)
    rng = scheduler.rng
    ready: dict[bytes, int] = {}
    writing: dict[bytes, int] = {}
    refused = evicted = 0
    for _ in range(900):
        verb = rng.choices(["begin", "store", "stored", "load", "loaded", "finish"])[0]
        if verb == "begin" or not scheduler.requests:
            scheduler.begin()
            continue
        request = rng.choice(scheduler.requests)
        match verb:
            case "store":
                keys = request.keys
                [prepared] = scheduler.call("prepare_store", request, keys)
                pinned = {key for other in scheduler.requests for key in other.loading or ()}
                may_go = set(ready) - pinned - set(keys)
                new = [key for key in keys if key not in ready and key not in writing]
                needed = max(0, len(new) - (slots - len(ready) - len(writing)))
                if needed > len(may_go):
                    assert prepared is None
                    refused += 1
                    continue
                assert prepared.keys_to_store == new
                assert len(set(prepared.evicted_keys)) == len(prepared.evicted_keys) == needed
                assert set(prepared.evicted_keys) <= may_go
                evicted += needed
                for key in prepared.evicted_keys:
                    del ready[key]
                writing |= dict(zip(new, prepared.store_spec.block_ids.tolist(), strict=True))
                held = [*ready.values(), *writing.values()]
                assert len(set(held)) == len(held)
                assert all(0 <= slot < slots for slot in held)
                if new:
                    request.stores.append([set(new)])
            case "stored" if request.stores:
                batch = request.stores[0][0]
                one.complete_store(batch, request.contexts[0])
                request.stores.pop(0)
                ready |= {key: writing.pop(key) for key in batch}
            case "load" if request.loading is None:
                here = list(takewhile({**ready, **writing}.__contains__, request.keys))
                waits = any(key in writing for key in here)
                [found] = scheduler.lookup(request)
                assert found == (None if waits else [LookupResult.HIT] * len(here))
                hits = [key for key in request.keys if key in ready]
                if hits:
                    [load] = scheduler.call("prepare_load", request, hits)
                    assert load.block_ids.tolist() == [ready[key] for key in hits]
                    request.loading = set(hits)
            case "loaded":
                scheduler.complete_load(request)
            case "finish" if not request.stores:
                scheduler.finish(request)
    assert refused > 5
    assert evicted > 50


def stored_behind(manager: Any, keys: list[bytes]) -> None:
    """Has the keys in the tier only."""
    context = begin(manager, keys)
    assert manager.prepare_store(keys, context) is not None
    manager.complete_store(set(keys), context)
    manager.on_request_finished(context)
    assert manager.manager.drain(20)
    manager.reset_cache()
    flush(manager)


def test_one_look_up_asks_a_tier_for_all_that_follows(manager: Callable[..., Any]) -> None:
    """A prefix behind host memory is one batch, one job, though vLLM asks key by key."""
    keys = keys_of(40)
    # Loads of a tier hold half of the slots at most (`load_share`).
    one = manager(ours, 2 * len(keys), tier=True)
    stored_behind(one, keys)
    before = one.manager.stats()["tiers"]["memory"]
    context = begin(one, keys)
    assert one.lookup(keys[0], context) is LookupResult.HIT_PENDING
    after = one.manager.stats()["tiers"]["memory"]
    assert after["hits"] - before["hits"] == len(keys)
    answers = [one.lookup(key, context) for key in keys]
    # The scan ends behind the second key, when it shows that it is a prefix's.
    assert answers[:3] == [LookupResult.HIT_PENDING, LookupResult.HIT_PENDING, LookupResult.MISS]
    assert one.manager.stats()["tiers"]["memory"]["lookups"] == after["lookups"]
    one.on_schedule_end(STEP)
    assert {one.lookup(key, context) for key in keys} == {LookupResult.HIT}
    assert one.manager.stats()["tiers"]["memory"]["load_latency"]["counts"].count(1) == 1
    assert one.get_load_source(keys[0], context).value == "host"


def test_a_window_is_scanned_to_its_end(manager: Callable[..., Any]) -> None:
    """Asked from the end, every key that is on its way is said to be, also when asked again."""
    one = manager(ours, 64, tier=True)
    keys = keys_of(12)
    stored_behind(one, keys)
    context = begin(one, keys)
    for asked in (keys, keys[:9], keys[:5]):
        for key in reversed(asked):
            assert one.lookup(key, context) is LookupResult.HIT_PENDING


def test_a_tier_filter_holds_for_its_request(manager: Callable[..., Any]) -> None:
    one = manager(ours, 64, tier=True)
    keys = keys_of(4)
    stored_behind(one, keys)
    only_disk = TierFilter((TierMatcher(medium=Medium.STORAGE),))
    assert one.lookup(keys[0], begin(one, keys, load_tier_filter=only_disk)) is LookupResult.MISS
    nothing = begin(one, keys, load_tier_filter=TierFilter(()))
    assert one.lookup(keys[0], nothing) is LookupResult.MISS
    host = begin(one, keys, load_tier_filter=TierFilter((TierMatcher(medium=Medium.CPU),)))
    assert one.lookup(keys[0], host) is LookupResult.HIT_PENDING


def test_slots_of_a_reset_stay_taken_until_the_workers_flushed(
    manager: Callable[..., Any],
) -> None:
    """Without word from vLLM: with two batches in flight, the flush has returned in the third."""
    slots = 8
    inner = kvtier.Manager(kvtier.Region(slots, SLOT))
    one = manager(lambda: KVTierOffloadingManager(inner, batches_in_flight=2))
    keys = keys_of(slots)
    context = begin(one, keys)
    assert one.prepare_store(keys, context) is not None
    one.reset_cache()
    others = keys_of(slots, prefix=1)
    context = begin(one, others)
    for _ in range(2):
        one.on_schedule_end(STEP)
        assert one.prepare_store(others, context) is None
    if ANNOUNCES_RESET_FLUSHED:
        one.on_reset_flushed()
    else:
        one.on_schedule_end(STEP)
    prepared = one.prepare_store(others, context)
    assert prepared is not None
    assert prepared.keys_to_store == others


def test_events_name_medium_and_owner(manager: Callable[..., Any]) -> None:
    one = manager(ours, 64, tier=True)
    stored_behind(one, keys_of(3))
    events = [(event.removed, event.medium, event.ownership) for event in one.take_events()]
    assert (False, Medium.CPU, None) in events
    assert (False, Medium.CPU, "memory") in events
    assert (True, Medium.CPU, None) in events
