"""`kvtier.replay`: rates, and the memory that a target takes."""

from __future__ import annotations

import pytest

from kvtier.errors import ConfigError
from kvtier.replay import OPTIMUM, Curves, Trace

from .conftest import Write


@pytest.fixture
def curves(write: Write, chats: list[list[int]]) -> Curves:
    return Curves.read(write(chats))


def test_points_are_rates_of_the_replay(curves: Curves) -> None:
    points = list(curves.points(["lru"], [10, 100]))
    assert [(point.policy, point.capacity) for point in points] == [("lru", 10), ("lru", 100)]
    for point in points:
        counts = curves.trace.replay("lru", point.capacity)
        assert point.trace == "small"
        assert point.requests == 100
        assert point.blocks == counts["blocks"] == 900
        assert point.block_hits == counts["block_hits"] / 900
        assert point.prefix_hits == counts["prefix_hits"] / 900
        assert point.optimum_hits == curves.trace.optimum(point.capacity) / 900


@pytest.mark.parametrize("seen", [(), (50, 250), (1, 299, 300, 301, 1000)])
@pytest.mark.parametrize("policy", ["lru", OPTIMUM])
def test_the_target_is_reached_and_with_less_it_is_not(
    curves: Curves, policy: str, seen: tuple[int, ...]
) -> None:
    list(curves.points(["lru"], seen))

    def hits(capacity: int) -> float:
        if policy == OPTIMUM:
            return curves.trace.optimum(capacity) / curves.trace.blocks
        count: int = curves.trace.replay(policy, capacity)["prefix_hits"]
        return count / curves.trace.blocks

    for target in (0.01, 0.3, curves.unlimited_hits()):
        answer = curves.target(policy, target)
        assert answer.capacity is not None
        assert answer.hits == hits(answer.capacity) >= target
        assert answer.capacity == 1 or hits(answer.capacity - 1) < target
        assert answer.unlimited_hits == curves.unlimited_hits() == 600 / 900


def test_more_than_unlimited_memory_has_can_not_be_reached(curves: Curves) -> None:
    answer = curves.target("lru", 0.7)
    assert (answer.capacity, answer.hits) == (None, None)
    assert answer.unlimited_hits == 600 / 900


@pytest.mark.parametrize("target", [0.0, -0.1, 1.01, float("nan")])
def test_what_is_no_rate_is_refused(curves: Curves, target: float) -> None:
    with pytest.raises(ConfigError, match="no hit rate"):
        curves.target("lru", target)


def test_a_trace_of_nothing_is_refused(write: Write) -> None:
    with pytest.raises(ConfigError, match="nothing: the trace has no requests"):
        Curves("nothing", Trace.read(write([[]])))
