"""Threads for calls that may hang."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from functools import partial

import pytest

from kvtier.tiers.callers import Callers

PATIENCE_S = 30.0


def nothing() -> None:
    pass


def hang(gate: threading.Event, begun: threading.Semaphore) -> Callable[[], None]:
    def call() -> None:
        begun.release()
        assert gate.wait(PATIENCE_S)

    return call


def test_calls_of_a_lane_run_in_order_on_its_thread() -> None:
    callers = Callers("test", {"only": 1}, PATIENCE_S)
    ran: queue.SimpleQueue[tuple[int, int]] = queue.SimpleQueue()

    def run(number: int) -> None:
        ran.put((number, threading.get_ident()))

    for number in range(20):
        callers.submit("only", partial(run, number))
    order, threads = zip(*(ran.get(timeout=PATIENCE_S) for _ in range(20)), strict=True)
    assert order == tuple(range(20))
    assert len(set(threads)) == 1
    assert callers.close(PATIENCE_S, nothing)


def test_others_stand_in_for_threads_that_hang_and_other_lanes_do_not_notice() -> None:
    callers = Callers("test", {"hangs": 1, "other": 1}, 0.0)
    gate, begun = threading.Event(), threading.Semaphore(0)
    done = threading.Semaphore(0)
    callers.submit("hangs", hang(gate, begun))
    assert begun.acquire(timeout=PATIENCE_S)
    callers.submit("other", done.release)
    callers.submit("hangs", done.release)
    callers.tend()
    for _ in range(2):
        assert done.acquire(timeout=PATIENCE_S)
    gate.set()
    assert callers.close(PATIENCE_S, nothing)


def test_there_are_only_so_many_stand_ins() -> None:
    callers = Callers("test", {"hangs": 2}, 0.0)
    gate, begun = threading.Event(), threading.Semaphore(0)
    before = threading.active_count()
    for _ in range(40):
        callers.submit("hangs", hang(gate, begun))
        callers.tend()
    for _ in range(10):
        assert begun.acquire(timeout=PATIENCE_S)
    assert threading.active_count() == before + 10
    gate.set()
    for _ in range(30):
        assert begun.acquire(timeout=PATIENCE_S), "what waited goes on"
    assert callers.close(PATIENCE_S, nothing)
    assert threading.active_count() <= before


def test_a_call_that_hangs_does_not_hold_close_up_and_the_last_one_leaves() -> None:
    callers = Callers("test", {"hangs": 1}, PATIENCE_S)
    gate, begun = threading.Event(), threading.Semaphore(0)
    left = threading.Event()
    callers.submit("hangs", hang(gate, begun))
    dropped = threading.Event()
    callers.submit("hangs", dropped.set)
    assert begun.acquire(timeout=PATIENCE_S)
    assert not callers.close(0.001, left.set)
    assert not left.is_set()
    gate.set()
    assert left.wait(PATIENCE_S)
    callers.submit("hangs", dropped.set)
    assert not dropped.is_set()


def test_what_a_call_raises_is_logged_and_the_thread_goes_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    callers = Callers("test", {"only": 1}, PATIENCE_S)
    done = threading.Event()

    def fail() -> None:
        raise ValueError("planted")

    with caplog.at_level(logging.ERROR, logger="kvtier"):
        callers.submit("only", fail)
        callers.submit("only", done.set)
        assert done.wait(PATIENCE_S)
    assert "planted" in caplog.text
    assert callers.close(PATIENCE_S, nothing)
