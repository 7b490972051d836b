"""Requests with options, resets, and tiers that fail, through Python."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, get_type_hints

import numpy as np
import pytest

import kvtier
from kvtier import HIT, HIT_PENDING, MISS, errors
from kvtier.config import Latency, PrimaryStats, TierLimits, TierStats
from kvtier.testing import faulty

KEY_BYTES = 8
CHUNK = 4096


def keys(*numbers: int) -> list[bytes]:
    return [number.to_bytes(KEY_BYTES, "little") for number in numbers]


def memory(**fields: Any) -> dict[str, Any]:
    return {"type": "memory", "capacity_bytes": 64 * CHUNK, **fields}


def make(*tiers: dict[str, Any], slots: int = 8, **options: Any) -> kvtier.Manager:
    return kvtier.Manager(kvtier.Region(slots, CHUNK), tiers, key_bytes=KEY_BYTES, **options)


def store(manager: kvtier.Manager, request: int, *numbers: int) -> None:
    prepared = manager.prepare_store(request, keys(*numbers))
    assert prepared is not None
    rows = np.asarray(manager.region)
    for index, slot in zip(prepared.indices, prepared.slots, strict=True):
        rows[slot] = numbers[index] % 256
    manager.complete_store(request, keys(*(numbers[index] for index in prepared.indices)))


def test_a_failing_tier_is_switched_off_and_tells_so() -> None:
    limits: dict[str, Any] = {
        "breaker_failures": 2,
        "breaker_pause_s": 3600.0,
        "breaker_max_pause_s": 3600,
    }
    manager = make(faulty(memory(), partial=1.0, name="bad", **limits), events=True)
    for number in range(4):
        store(manager, 1, number)
        assert manager.drain(30)
    stats = manager.stats()["tiers"]["bad"]
    assert (stats["store_breaker"], stats["load_breaker"]) == ("open", "closed")
    assert stats["store_failures"] == {"lost": 0, "io": 2, "corrupt": 0, "missing": 0, "full": 0}
    assert (stats["store_breaker_opened"], stats["refused"]) == (1, 2)
    changes = [event for event in manager.take_events() if "breaker" in event[0]]
    assert changes == [("store_breaker_open", "bad", [])]
    manager.shutdown()


def test_every_figure_is_documented_and_of_its_type() -> None:
    manager = make(memory())
    store(manager, 1, 1, 2)
    assert manager.drain(30)
    stats = manager.stats()
    assert set(stats["primary"]) == set(get_type_hints(PrimaryStats))
    tier = stats["tiers"]["memory"]
    assert set(tier) == set(get_type_hints(TierStats))
    assert set(tier["store_latency"]) == set(get_type_hints(Latency))
    assert len(tier["store_latency"]["counts"]) == len(kvtier.LATENCY_BUCKETS)
    assert sum(tier["store_latency"]["counts"]) == 1
    assert kvtier.LATENCY_BUCKETS[-1] == float("inf")
    manager.shutdown()


def test_every_limit_is_documented_and_taken() -> None:
    values: dict[str, Any] = {
        "name": "m",
        "max_queued_bytes": 1 << 20,
        "shed": "oldest",
        "breaker_failures": 0,
        "load_share": 1,
        "offload": "request",
        "high_water_s_per_mib": 2,
        "low_water_s_per_mib": 1,
    }
    limits = {name: values.get(name, 7.5) for name in get_type_hints(TierLimits)}
    manager = make(memory(**limits))
    assert list(manager.stats()["tiers"]) == ["m"]
    manager.shutdown()


@pytest.mark.parametrize(
    ("fields", "part"),
    [
        ({"shed": "all"}, 'shed = "all".*`newest` or `oldest`'),
        ({"breaker_failures": -1}, "breaker_failures = -1"),
        ({"load_deadline_s": 0}, "load_deadline_s = 0"),
        ({"high_water_s_per_mib": 0.01}, "high_water_s_per_mib = 0.01"),
        ({"load_share": 1.5}, "load_share = 1.5"),
        ({"offload": 3}, "offload = 3"),
        ({"breaker_pauses": 3}, "unknown field `breaker_pauses`"),
    ],
)
def test_a_bad_limit_is_named_with_what_is_allowed(fields: dict[str, Any], part: str) -> None:
    with pytest.raises(errors.ConfigError, match=part):
        make(memory(**fields))


@pytest.mark.parametrize(
    ("faults", "part"),
    [({"loss": 2}, "loss = 2 is not between 0 and 1"), ({"lost": 1}, "unknown field `lost`")],
)
def test_bad_faults_are_named(faults: dict[str, Any], part: str) -> None:
    with pytest.raises(errors.ConfigError, match=part):
        make({"type": "faulty", "inner": memory(), "faults": faults})


def test_a_tier_of_any_kind_can_be_made_to_fail() -> None:
    class Nothing(kvtier.SecondaryTier):
        def lookup(self, keys: Sequence[bytes]) -> Sequence[int]:
            return [MISS] * len(keys)

        def submit_store(self, job: kvtier.TierJob) -> None:
            raise AssertionError(f"{job} should be lost before it comes here")

        submit_load = submit_store

        def finished(self) -> list[kvtier.JobResult]:
            return []

    kvtier.register_tier("nothing", Nothing)
    manager = make(faulty({"type": "nothing"}, loss=1.0, name="lossy"))
    store(manager, 1, 1)
    assert manager.drain(30)
    assert manager.stats()["tiers"]["lossy"]["store_failures"]["lost"] == 1
    manager.shutdown()
    with pytest.raises(errors.ConfigError, match="unknown field `size`"):
        make(faulty({"type": "nothing", "size": 1}))


def test_a_request_may_use_the_tiers_that_match() -> None:
    manager = make(memory(), slots=4)
    store(manager, 1, 1, 2, 3, 4)
    assert manager.drain(30)
    store(manager, 2, 5)
    manager.begin_request(3, tiers=[{"medium": "file"}])
    assert manager.lookup(3, keys(4)).tolist() == [MISS]
    manager.begin_request(4, tiers=[{"medium": "file"}, {"locality": "local"}])
    assert manager.lookup(4, keys(4)).tolist() == [HIT_PENDING]
    for matcher, part in [({"media": "file"}, "media"), ({"medium": "tape"}, "memory, file")]:
        with pytest.raises(errors.ConfigError, match=part):
            manager.begin_request(5, tiers=[matcher])
    with pytest.raises(errors.ConfigError, match=r'no tier "tape".*memory'):
        manager.begin_request(5, request_level=["tape"])
    manager.shutdown()


def test_a_request_level_tier_gets_what_was_resident() -> None:
    manager = make(memory(), memory(name="all", offload="request"))
    store(manager, 1, 1)
    assert manager.drain(30)
    before = manager.stats()["tiers"]["all"]["store_latency"]["counts"]
    store(manager, 2, 1)
    assert manager.drain(30)
    tiers = manager.stats()["tiers"]
    assert sum(tiers["all"]["store_latency"]["counts"]) == sum(before) + 1
    assert sum(tiers["memory"]["store_latency"]["counts"]) == 1
    manager.shutdown()


def test_reset_forgets_the_primary_tier_and_keeps_the_others() -> None:
    manager = make(memory(), events=True)
    store(manager, 1, 1, 2)
    assert manager.drain(30)
    manager.prepare_load(2, keys(1))
    manager.take_events()
    manager.reset()
    ((kind, tier, removed),) = manager.take_events()
    assert (kind, tier, sorted(removed)) == ("removed", "primary", sorted(keys(1, 2)))
    with pytest.raises(errors.KvTierError):
        manager.complete_load(2, keys(1))
    assert manager.stats()["primary"]["detached"] == 1
    assert manager.lookup(3, keys(1)).tolist() == [HIT_PENDING]
    manager.end_step()
    assert manager.stats()["tiers"]["memory"]["loads_in_flight"] == 0
    manager.reset_flushed()
    assert manager.drain(30)
    assert manager.stats()["primary"]["detached"] == 0
    slots = manager.prepare_load(3, keys(1))
    assert (np.asarray(manager.region)[slots] == 1).all()
    assert manager.lookup(3, keys(1)).tolist() == [HIT]
    manager.shutdown()
