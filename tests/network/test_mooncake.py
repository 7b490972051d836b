"""The mooncake tier on a Mooncake Store of real processes, over TCP on loopback."""

from __future__ import annotations

import hashlib
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

import kvtier
import kvtier.testing
from kvtier import MISS, errors
from kvtier.testing.engine import PATIENCE_S, STEP_S, Engine, key

pytest.importorskip("mooncake", reason="kvtier[mooncake] is not installed")

from tests.network.mooncake_store import Master, Node, client, mooncake


@pytest.fixture(scope="module")
def store() -> Iterator[Master]:
    with mooncake(nodes=1) as (master, _):
        yield master


def settings(master: Master, prefix: object, **fields: Any) -> dict[str, Any]:
    return {"type": "mooncake", "master": master.address, "prefix": str(prefix), **fields}


class TestMooncakeTier(kvtier.testing.TierConformance):
    persistent = True

    @pytest.fixture(autouse=True)
    def with_store(self, store: Master) -> None:
        self.master = store

    def config(self, path: Path, capacity_bytes: int) -> Mapping[str, Any]:  # noqa: ARG002
        return settings(self.master, path)

    def damage(self, path: Path) -> None:
        """Changes the last byte of every value under the path."""
        with client(self.master) as other:
            for name in named(other, path, range(16)):
                value = bytearray(other.get_buffer(name))
                value[-1] ^= 1
                replace(other, name, bytes(value))


def named(other: Any, prefix: object, numbers: Any) -> list[str]:
    """What the chunks are called in the store, of those that are there."""
    id = hashlib.sha256(b'[1,4096,16,"conformance"]').hexdigest()[:32]
    names = [f"{prefix}/{id}/{key(number).hex()}" for number in numbers]
    there = other.batch_is_exist(names)
    return [name for name, code in zip(names, there, strict=True) if code == 1]


def replace(other: Any, name: str, value: bytes) -> None:
    assert other.remove(name, True) == 0
    assert other.put(name, value) == 0


def engine(config: Mapping[str, Any], **fields: Any) -> Engine:
    return Engine({**config, **fields}, slots=32)


def test_engines_of_one_namespace_serve_each_other(store: Master, tmp_path: Path) -> None:
    one, two = (engine(settings(store, tmp_path)) for _ in range(2))
    one.store([1, 2, 3])
    one.settle()
    assert two.bring([1, 2, 3, 4]) == [1, 2, 3]
    other = Engine(settings(store, tmp_path), slots=8, namespace="another")
    assert other.ask([1, 2, 3]) == [MISS] * 3
    for each in (one, two, other):
        each.close()


@pytest.mark.parametrize(
    "spoil",
    [
        pytest.param(lambda value: value[:-1], id="truncated"),
        pytest.param(lambda value: value + b"x", id="longer"),
        pytest.param(lambda value: b"KVTMOON2" + value[8:], id="newer"),
        pytest.param(lambda value: value[:16] + bytes(4096), id="other bytes"),
        pytest.param(lambda _: b"", id="short"),
    ],
)
def test_a_value_that_is_not_ours_is_a_miss_and_goes(
    store: Master, tmp_path: Path, spoil: Any
) -> None:
    tier = engine(settings(store, tmp_path))
    tier.store([1, 2])
    tier.forget()
    with client(store) as other:
        (name,) = named(other, tmp_path, [1])
        value = spoil(bytes(other.get_buffer(name))) or b"?"
        replace(other, name, value)
        assert tier.bring([1, 2]) == [2]
        assert tier.tier["load_failures"]["corrupt"] == 1
        assert tier.ask([1]) == [MISS]
        tier.store([1])
        tier.forget()
        assert tier.bring([1]) == [1]
    tier.close()


def test_the_value_of_another_key_is_a_miss(store: Master, tmp_path: Path) -> None:
    tier = engine(settings(store, tmp_path))
    tier.store([1, 2])
    tier.forget()
    with client(store) as other:
        one, two = named(other, tmp_path, [1, 2])
        replace(other, one, bytes(other.get_buffer(two)))
    assert tier.bring([1, 2]) == [2]
    tier.close()


def test_a_value_that_vanished_is_a_miss(store: Master, tmp_path: Path) -> None:
    tier = engine(settings(store, tmp_path))
    tier.store([1, 2])
    tier.forget()
    tier.ask([1, 2])
    with client(store) as other:
        (name,) = named(other, tmp_path, [1])
        assert other.remove(name, True) == 0
    tier.settle()
    assert tier.compare([1, 2]) == [2]
    assert tier.tier["load_failures"]["missing"] == 1
    tier.close()


def until_it_serves(tier: Engine, number: int) -> None:
    """Stores a chunk until it comes back."""
    while True:
        tier.store([number])
        tier.forget()
        if tier.bring([number]) == [number]:
            return


def on_node(master: Master, node: Node, prefix: object, numbers: Sequence[int]) -> list[int]:
    """The chunks that lie on a node."""
    with client(master) as other:
        names = named(other, prefix, numbers)
        found = other.batch_get_replica_desc(names)
    places = [found[name][0].get_memory_descriptor().buffer_descriptor for name in names]
    return [
        number
        for number, place in zip(numbers, places, strict=True)
        if place.transport_endpoint == node.endpoint
    ]


def test_a_node_that_stops_holds_up_its_own_chunks_alone(tmp_path: Path) -> None:
    with mooncake(nodes=2) as (master, nodes):
        tier = engine(settings(master, tmp_path, hangs_after_s=0.1), load_deadline_s=0.5)
        numbers = list(range(24))
        tier.store(numbers)
        tier.forget()
        stopped, healthy = (on_node(master, node, tmp_path, numbers) for node in nodes)
        assert sorted(stopped + healthy) == numbers
        assert stopped
        assert healthy
        nodes[0].signal(signal.SIGSTOP)
        # The first load finds out; what it wanted is a miss at its deadline.
        tier.ask(stopped[:1])
        tier.manager.end_step()
        steps_until(tier, lambda: tier.tier["loads_overdue"] == 1)
        assert tier.ask(stopped) == [MISS] * len(stopped)
        tier.ask(healthy)
        steps_until(tier, lambda: tier.tier["loads"] == len(healthy))
        assert tier.compare(healthy) == healthy
        assert tier.tier["quarantined"] == 1, "the slot is still the job's"
        nodes[0].kill()
        tier.settle()
        assert tier.tier["quarantined"] == 0
        tier.close()


def steps_until(tier: Engine, holds: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < end, tier.tier
        tier.manager.end_step()
        time.sleep(STEP_S)


def test_a_master_that_stops_holds_nothing_up(tmp_path: Path) -> None:
    with mooncake(nodes=1) as (master, _):
        tier = engine(settings(master, tmp_path))
        tier.store([1, 2, 3])
        tier.forget()
        master.signal(signal.SIGSTOP)
        assert tier.ask([1, 2, 3]) == [MISS] * 3
        assert tier.ask([4]) == [MISS]
        assert not any(tier.tier["faults"].values()), "the tier's own thread was held up"
        master.signal(signal.SIGCONT)
        until_it_serves(tier, 5)
        tier.close()


def test_a_master_that_dies_and_comes_back_empty(tmp_path: Path) -> None:
    with mooncake(nodes=1) as (master, nodes):
        tier = engine(settings(master, tmp_path))
        tier.store([1])
        tier.forget()
        master.kill()
        assert tier.bring([1]) == []
        tier.store([2])
        tier.forget()
        assert tier.tier["store_failures"]["io"] > 0
        master.start()
        until_it_serves(tier, 3)
        assert nodes[0].process.poll() is None
        tier.close()


def test_it_begins_without_a_master_and_finds_it_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MC_STORE_CLIENT_SETUP_RETRIES", "1")
    monkeypatch.setattr("kvtier.tiers.mooncake._CONNECT_S", 0.1)
    with Master() as master:
        master.kill()
        tier = engine(settings(master, tmp_path, segment_bytes=64 << 20))
        assert tier.ask([1]) == [MISS]
        master.start()
        until_it_serves(tier, 1)
        tier.close()


@pytest.mark.parametrize(
    ("fields", "part"),
    [
        ({"master": "nowhere"}, "'nowhere' is not HOST:PORT"),
        ({"master": "h:1", "threads": 0}, "threads = 0"),
        ({"master": "h:1", "replicas": 0}, "replicas = 0"),
        ({"master": "h:1", "answer_within_s": 0}, "answer_within_s = 0"),
        ({}, "missing field `master`"),
    ],
)
def test_settings_that_can_not_be_are_refused(fields: dict[str, Any], part: str) -> None:
    with pytest.raises(errors.ConfigError, match=part):
        kvtier.Manager(kvtier.Region(1, 4096), [{"type": "mooncake", **fields}])
