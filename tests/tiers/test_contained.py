"""A tier in Python that breaks the contract: contained, counted, and the engine goes on."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from tests.tiers.plain import KEY_BYTES, PATIENCE_S, Bench, Plain, keys

import kvtier
from kvtier import HIT, HIT_PENDING, MISS, JobResult, TierContext, TierJob, TierUsage

METHODS = (
    "lookup",
    "submit_store",
    "submit_load",
    "finished",
    "touch",
    "discard",
    "finish_request",
    "take_removed",
    "usage",
)


class Broken(Plain):
    """Does something else in the methods of `broken`."""

    broken: set[str]

    def __init__(self, context: TierContext) -> None:
        super().__init__(context)
        self.broken = set()

    def instead(self) -> Any:
        raise NotImplementedError

    def lookup(self, keys: Sequence[bytes]) -> Sequence[int]:
        return self.instead() if "lookup" in self.broken else super().lookup(keys)

    def submit_store(self, job: TierJob) -> None:
        self.instead() if "submit_store" in self.broken else super().submit_store(job)

    def submit_load(self, job: TierJob) -> None:
        self.instead() if "submit_load" in self.broken else super().submit_load(job)

    def finished(self) -> Iterable[JobResult]:
        return self.instead() if "finished" in self.broken else super().finished()

    def touch(self, keys: Sequence[bytes]) -> None:  # noqa: ARG002
        if "touch" in self.broken:
            self.instead()

    def discard(self, keys: Sequence[bytes]) -> None:
        for key in keys:
            del self.kept[key]
        if "discard" in self.broken:
            self.instead()

    def finish_request(self, request: int) -> None:  # noqa: ARG002
        if "finish_request" in self.broken:
            self.instead()

    def take_removed(self) -> Iterable[bytes]:
        return self.instead() if "take_removed" in self.broken else ()

    def usage(self) -> TierUsage:
        return self.instead() if "usage" in self.broken else super().usage()


def provoke(bench: Bench, method: str) -> None:
    """Has the tier called in `method` with number 1 in it, and more numbers."""
    if method == "lookup":
        bench.ask(9)
    elif method == "touch":
        bench.manager.touch(7, keys(1))
    elif method == "submit_load":
        bench.forget()
        assert bench.ask(1) == [HIT_PENDING]
    elif method == "discard":
        bench.tier.kept[keys(1)[0]] = (bytes(4096), 0)
        bench.forget()
        assert bench.bring(1) == [MISS]
    else:
        bench.store(2)


@pytest.mark.parametrize("error", [ValueError, SystemExit, KeyboardInterrupt])
@pytest.mark.parametrize("method", METHODS)
def test_a_method_that_raises(method: str, error: type[BaseException]) -> None:
    class Raising(Broken):
        def instead(self) -> Any:
            raise error("planted")

    bench = Bench(Raising)
    bench.store(1)
    bench.settle()
    tier = bench.tier
    assert isinstance(tier, Raising)
    tier.broken = {method}
    provoke(bench, method)
    bench.until(lambda: bench.faults.get("raised"))
    tier.broken = set()
    bench.settle()
    # It works again as if nothing had been.
    bench.store(3)
    bench.forget()
    assert bench.bring(3) == [HIT]
    assert set(bench.faults) == {"raised"}
    bench.close()


def test_a_job_whose_submission_raised_is_lost_at_once() -> None:
    class Raising(Broken):
        def instead(self) -> Any:
            raise ValueError("planted")

    bench = Bench(Raising, load_deadline_s=600)
    assert isinstance(bench.tier, Raising)
    bench.store(1)
    bench.forget()
    bench.tier.broken = {"submit_load"}
    assert bench.bring(1) == [MISS]
    assert bench.load_failures == {"lost": 1}
    bench.close()


def test_a_shutdown_that_raises() -> None:
    class Raising(Plain):
        def shutdown(self) -> None:
            raise SystemExit(3)

    bench = Bench(Raising)
    bench.store(1)
    bench.close()
    bench.manager.shutdown()


def test_a_constructor_that_raises_is_heard_and_the_tiers_before_it_are_closed(
    tmp_path: Path,
) -> None:
    class Unhappy(Plain):
        def __init__(self, context: TierContext) -> None:  # noqa: ARG002
            raise ZeroDivisionError("planted")

    kvtier.register_tier("unhappy", Unhappy)
    disk = {"type": "file", "path": tmp_path, "capacity_bytes": 1 << 20}
    with pytest.raises(ZeroDivisionError, match="planted"):
        kvtier.Manager(kvtier.Region(1, 4096), [disk, {"type": "unhappy"}], key_bytes=KEY_BYTES)
    kvtier.Manager(kvtier.Region(1, 4096), [disk], key_bytes=KEY_BYTES).shutdown()


def result(*fields: Any, **named: Any) -> JobResult:
    """A result of any types."""
    return JobResult(*fields, **named)


@pytest.fixture
def interrupts() -> Iterator[None]:
    """SIGINT raises KeyboardInterrupt, also where it was ignored: in the background of a shell."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interrupts")
def test_an_interrupt_while_a_constructor_waits_closes_the_tier_when_it_is_open() -> None:
    gate, closed = threading.Event(), threading.Event()

    class Waiting(Plain):
        def __init__(self, context: TierContext) -> None:
            # To that thread: another one would not wake it up.
            main = threading.main_thread().ident
            assert main is not None
            signal.pthread_kill(main, signal.SIGINT)
            assert gate.wait(PATIENCE_S)
            super().__init__(context)

        def shutdown(self) -> None:
            closed.set()

    Waiting.made = []
    kvtier.register_tier("waiting", Waiting)
    with pytest.raises(KeyboardInterrupt):
        kvtier.Manager(kvtier.Region(1, 4096), [{"type": "waiting"}], key_bytes=KEY_BYTES)
    gate.set()
    assert closed.wait(PATIENCE_S)


@pytest.mark.parametrize(
    ("reports", "faults"),
    [
        (lambda job: [result(job + 1000)], {"unknown_job": 1}),
        (lambda job: [result(job, done=keys(1)), result(job)], {"repeated_job": 1}),
        (lambda job: [result(job, done=keys(1, 8, 9))], {"foreign_key": 2}),
        (lambda job: [result(job, failed={keys(9)[0]: "io"})], {"foreign_key": 1}),
        (lambda job: [result(job, done=[1, "a"])], {"bad_value": 2}),
        (lambda job: [result(job, done=keys(1)[0])], {"bad_value": 1}),
        (lambda job: [result(job, done=7)], {"bad_value": 1}),
        (lambda job: [result(job, failed=keys(1))], {"bad_value": 1}),
        (lambda job: [result(job, failed={keys(1)[0]: "bored"})], {"bad_value": 1}),
        (lambda job: [result(job, evicted=[b"short"])], {"bad_value": 1}),
        (lambda job: [result(job, seconds=-1.0)], {"bad_value": 1}),
        (lambda job: [result(job, seconds="long")], {"bad_value": 1}),
        (lambda job: [result(str(job))], {"bad_value": 1}),
        (lambda job: [job], {"bad_value": 1}),
        (lambda _: None, {"bad_value": 1}),
        (lambda _: 3, {"bad_value": 1}),
    ],
)
def test_a_report_that_can_not_be(reports: Any, faults: dict[str, int]) -> None:
    class Liar(Plain):
        def submit_store(self, job: TierJob) -> None:
            self.lie = reports(job.id)

        def finished(self) -> Any:
            lie, self.lie = getattr(self, "lie", ()), ()
            return lie

    bench = Bench(Liar)
    bench.store(1)
    bench.settle()
    assert bench.faults == faults
    bench.close()


def test_what_is_right_in_a_wrong_report_holds() -> None:
    class Liar(Plain):
        def finished(self) -> Iterable[JobResult]:
            for result in super().finished():
                yield JobResult(result.job, done=[*result.done, *keys(99)])
                raise ValueError("planted")

    bench = Bench(Liar)
    bench.store(1, 2)
    bench.settle()
    assert bench.figures["stores"] == 2
    assert bench.faults == {"foreign_key": 1, "raised": 1}
    bench.close()


def test_results_without_end() -> None:
    class Endless(Plain):
        def finished(self) -> Iterable[JobResult]:
            while True:
                yield JobResult(77)

    bench = Bench(Endless)
    bench.store(1)
    bench.until(lambda: bench.faults.get("bad_value"))
    bench.close()


@pytest.mark.parametrize(
    "answers",
    [
        [HIT],
        [HIT, HIT, HIT],
        [HIT, HIT_PENDING],
        [HIT, 77],
        [HIT, "yes"],
        [HIT, None],
        None,
        5,
        b"\x01\x01",
    ],
)
def test_answers_that_can_not_be_are_misses(answers: Any) -> None:
    class Liar(Plain):
        def lookup(self, keys: Sequence[bytes]) -> Any:  # noqa: ARG002
            return answers

    bench = Bench(Liar)
    answered = bench.ask(1, 2)
    assert answered[1] == MISS
    bench.until(lambda: set(bench.faults) == {"bad_value"})
    bench.settle()
    bench.close()


def test_usage_and_removed_keys_that_can_not_be() -> None:
    class Liar(Plain):
        def usage(self) -> Any:
            return "full"

        def take_removed(self) -> Any:
            return [b"short", 3]

    bench = Bench(Liar)
    bench.store(1)
    bench.settle()
    bench.until(lambda: bench.faults.get("bad_value", 0) >= 3)
    assert bench.figures["used_bytes"] == 0
    bench.close()


def test_a_job_that_is_dropped_is_lost_at_once() -> None:
    class Forgetful(Plain):
        def submit_load(self, job: TierJob) -> None:
            pass

    bench = Bench(Forgetful, load_deadline_s=600)
    bench.store(1)
    bench.forget()
    assert bench.bring(1) == [MISS]
    assert bench.load_failures == {"lost": 1}
    assert bench.faults == {}
    bench.close()


class Keeper(Plain):
    """Keeps jobs, and reports them when told."""

    def __init__(self, context: TierContext) -> None:
        super().__init__(context)
        self.jobs: list[TierJob] = []

    def submit_load(self, job: TierJob) -> None:
        self.jobs.append(job)


def test_a_job_that_is_never_reported_is_a_miss_and_its_slot_is_not_used_again() -> None:
    bench = Bench(Keeper, slots=1, load_deadline_s=0.05)
    tier = bench.tier
    assert isinstance(tier, Keeper)
    bench.store(1)
    bench.forget()
    assert bench.bring(1) == [MISS]
    assert (bench.figures["loads_overdue"], bench.held()) == (1, (0, 0, 1))
    assert bench.manager.prepare_store(50, keys(2)) is None
    (job,) = tier.jobs
    assert job.cancelled
    # Reported at last: too late to be a hit, and the slot comes back.
    tier.results.append(JobResult(job.id, done=tier.fill(job)))
    bench.until(lambda: bench.held() == (0, 0, 0))
    assert bench.figures["quarantined"] == 0
    assert job.chunks == []
    bench.store(2)
    bench.close()


def test_a_view_that_is_kept_keeps_its_slot() -> None:
    kept: list[Any] = []

    class Viewer(Plain):
        def submit_load(self, job: TierJob) -> None:
            kept.append(np.frombuffer(job.chunks[0], np.uint8))
            super().submit_load(job)

    bench = Bench(Viewer, slots=1, load_deadline_s=0.05)
    bench.store(1)
    bench.forget()
    # Its bytes are right and it was reported, but it could still be written.
    assert bench.bring(1) == [MISS]
    assert bench.held() == (0, 0, 1)
    assert bench.manager.prepare_store(50, keys(2)) is None
    kept.clear()
    bench.until(lambda: bench.held() == (0, 0, 0))
    bench.close()


def test_bytes_that_change_after_the_report_are_found() -> None:
    kept: list[memoryview] = []

    class Meddler(Plain):
        def submit_load(self, job: TierJob) -> None:
            kept.append(job.chunks[0][10:20])
            super().submit_load(job)

    bench = Bench(Meddler)
    bench.store(1)
    bench.forget()
    bench.ask(1)
    bench.until(lambda: kept and bench.tier.results == [])
    # A call that comes after the one in which the tier reported.
    bench.ask(9)
    kept[0][3] ^= 1
    kept.clear()
    assert bench.bring(1) == [MISS]
    assert bench.load_failures == {"corrupt": 1}
    bench.close()


@pytest.mark.parametrize("wrong", ["bytes", "checksum", "no checksum"])
def test_a_load_that_is_not_what_was_stored_is_a_miss_and_discarded(wrong: str) -> None:
    discarded: list[bytes] = []

    class Bad(Plain):
        def submit_load(self, job: TierJob) -> None:
            done = self.fill(job)
            if wrong == "bytes":
                job.chunks[0][17] ^= 1
            elif wrong == "checksum":
                done[job.keys[0]] ^= 1
            else:
                done[job.keys[0]] = "none"  # type: ignore[assignment]
            self.results.append(JobResult(job.id, done=done))

        def discard(self, keys: Sequence[bytes]) -> None:
            for key in keys:
                discarded.append(key)
                del self.kept[key]

    bench = Bench(Bad)
    bench.store(1)
    bench.forget()
    assert bench.bring(1) == [MISS]
    if wrong == "no checksum":
        assert (bench.load_failures, discarded) == ({"lost": 1}, [])
        assert bench.faults == {"bad_value": 1}
    else:
        assert bench.load_failures == {"corrupt": 1}
        # Gone before anybody can find it again.
        assert bench.ask(1) == [MISS]
        assert discarded == keys(1)
    bench.close()


class Blocking(Broken):
    gate: ClassVar[threading.Event]
    inside: ClassVar[threading.Event]

    def instead(self) -> Any:
        self.inside.set()
        assert self.gate.wait(PATIENCE_S)


def blocking(method: str, **fields: Any) -> Bench:
    """A tier that is stuck in a method, until its gate opens."""
    Blocking.gate, Blocking.inside = threading.Event(), threading.Event()
    bench = Bench(Blocking, slots=32, load_deadline_s=0.4, lookup_deadline_s=0.4, **fields)
    bench.store(1)
    bench.settle()
    assert isinstance(bench.tier, Blocking)
    bench.tier.broken = {method}
    if method == "lookup":
        bench.manager.lookup(99, keys(9))
    else:
        provoke(bench, method)
        bench.manager.end_step()
    assert Blocking.inside.wait(PATIENCE_S)
    return bench


@pytest.mark.parametrize("method", METHODS)
def test_a_method_that_blocks(method: str) -> None:
    bench = blocking(method, max_queued_bytes=5 * 4096, store_deadline_s=0.4)
    # Look-ups become misses, the breaker opens, and stores are bounded.
    bench.until(lambda: bench.manager.lookup(99, keys(9)).tolist() == [MISS])
    bench.until(lambda: bench.faults.get("blocked"))
    bench.until(lambda: bench.figures["load_breaker"] == "open")
    for number in range(100, 120):
        bench.store(number)
    assert bench.figures["queued_bytes"] <= 5 * 4096
    assert bench.figures["sheds"] + bench.figures["refused"] > 0
    bench.manager.touch(1, keys(*range(100, 120)))
    bench.manager.validate()
    Blocking.gate.set()
    assert isinstance(bench.tier, Blocking)
    bench.tier.broken = set()
    bench.until(lambda: bench.held() == (0, 0, 0))
    bench.close()


def test_stores_that_wait_for_a_blocked_tier_are_given_up_at_their_deadline() -> None:
    bench = blocking("lookup", store_deadline_s=0.4)
    bench.store(2)
    assert bench.held()[0] == 1
    bench.until(lambda: bench.held() == (0, 0, 0))
    assert bench.figures["store_failures"]["lost"] == 1
    Blocking.gate.set()
    bench.close()


def test_a_blocked_tier_does_not_hold_shutdown_up_and_keeps_the_region() -> None:
    views: list[memoryview] = []

    class Stuck(Blocking):
        def submit_load(self, job: TierJob) -> None:
            views.append(job.chunks[0])
            self.instead()

    Stuck.gate, Stuck.inside = threading.Event(), threading.Event()
    bench = Bench(Stuck)
    bench.store(1)
    bench.forget()
    bench.ask(1)
    bench.manager.end_step()
    assert Stuck.inside.wait(PATIENCE_S)
    bench.manager.shutdown()
    assert not Stuck.gate.is_set()
    bench.manager.shutdown()
    bench.rows = np.empty(0)
    del bench.manager
    # The tier still writes where the slot was.
    views[0][:] = b"x" * 4096
    assert bytes(views[0][:2]) == b"xx"
    Stuck.gate.set()
