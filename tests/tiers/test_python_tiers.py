"""What a tier in Python may rely on."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

import numpy as np
import pytest
from tests.tiers.plain import KEY_BYTES, PATIENCE_S, Bench, Plain, keys

import kvtier
from kvtier import HIT, HIT_PENDING, MISS, RETRY, JobResult, TierContext, TierJob, TierUsage


def test_all_calls_come_on_one_thread_of_its_own() -> None:
    threads: dict[str, int] = {}

    class Noting(Plain):
        def __init__(self, context: TierContext) -> None:
            self.note("__init__")
            super().__init__(context)

        def note(self, method: str) -> None:
            threads[method] = threading.get_ident()

        def lookup(self, keys: Sequence[bytes]) -> Sequence[int]:
            self.note("lookup")
            return super().lookup(keys)

        def submit_store(self, job: TierJob) -> None:
            self.note("submit_store")
            super().submit_store(job)

        def submit_load(self, job: TierJob) -> None:
            self.note("submit_load")
            super().submit_load(job)

        def finished(self) -> Iterable[JobResult]:
            self.note("finished")
            return super().finished()

        def touch(self, keys: Sequence[bytes]) -> None:  # noqa: ARG002
            self.note("touch")

        def finish_request(self, request: int) -> None:  # noqa: ARG002
            self.note("finish_request")

        def take_removed(self) -> Iterable[bytes]:
            self.note("take_removed")
            return ()

        def usage(self) -> TierUsage:
            self.note("usage")
            return super().usage()

        def shutdown(self) -> None:
            self.note("shutdown")

    bench = Bench(Noting)
    bench.store(1)
    bench.manager.touch(1, keys(1))
    bench.forget()
    assert bench.bring(1) == [HIT]
    bench.until(lambda: "finish_request" in threads)
    bench.close()
    methods = {name for name in vars(kvtier.SecondaryTier) if not name.startswith("_")}
    assert set(threads) == methods - {"medium", "locality", "discard"} | {"__init__"}
    (only,) = set(threads.values())
    assert only != threading.get_ident()


def test_the_context_says_what_the_tier_is_for() -> None:
    class Large(Plain):
        medium: ClassVar[Any] = "memory"
        locality: ClassVar[Any] = "remote"

    Large.made = []
    kvtier.register_tier("large", Large)
    region = kvtier.Region(1, 5000)
    manager = kvtier.Manager(
        region, [{"type": "large", "name": "n"}], key_bytes=KEY_BYTES, namespace="model"
    )
    context = Large.made[0].context
    found = (context.name, context.chunk_bytes, context.key_bytes, context.namespace)
    assert found == ("n", region.slot_bytes, KEY_BYTES, "model")
    stats = manager.stats()["tiers"]["n"]
    assert (stats["medium"], stats["locality"]) == ("memory", "remote")
    # Known from the start, for a tier that kept chunks.
    assert stats["capacity_bytes"] == 1 << 30
    manager.shutdown()


def test_chunks_are_the_slots_themselves() -> None:
    addresses: dict[str, int] = {}
    jobs: list[TierJob] = []

    class Looking(Plain):
        def submit_store(self, job: TierJob) -> None:
            jobs.append(job)
            with pytest.raises(TypeError, match="read-only"):
                job.chunks[0][0] = 1
            with pytest.raises(ValueError, match="read-only"):
                np.frombuffer(job.chunks[0], np.uint8)[0] = 1
            addresses["store"] = np.frombuffer(job.chunks[0], np.uint8).ctypes.data
            super().submit_store(job)

        def submit_load(self, job: TierJob) -> None:
            jobs.append(job)
            assert job.checksums == []
            addresses["load"] = np.frombuffer(job.chunks[0], np.uint8).ctypes.data
            super().submit_load(job)

    bench = Bench(Looking)
    bench.store(5)
    assert bench.manager.lookup(1, keys(5)).tolist() == [HIT]
    (slot,) = bench.manager.prepare_load(1, keys(5))
    place = bench.rows[slot].ctypes.data
    bench.manager.complete_load(1, keys(5))
    bench.settle()
    bench.forget()
    bench.rows[:] = 0
    assert bench.bring(5) == [HIT]
    (slot,) = bench.manager.prepare_load(1, keys(5))
    assert addresses == {"store": place, "load": bench.rows[slot].ctypes.data}
    bench.manager.complete_load(1, keys(5))
    assert bench.faults == {}
    for job in jobs:
        # The views were taken back with the report.
        assert (job.chunks, job.keys, job.cancelled) == ([], keys(5), True)
    bench.close()


def test_views_of_a_reported_job_are_released() -> None:
    views: list[memoryview] = []

    class Keeping(Plain):
        def submit_load(self, job: TierJob) -> None:
            views.extend(job.chunks)
            super().submit_load(job)

    bench = Bench(Keeping)
    bench.store(1)
    bench.forget()
    assert bench.bring(1) == [HIT]
    with pytest.raises(ValueError, match="released"):
        views[0][0] = 1
    bench.close()


def test_a_store_keeps_its_pin_until_the_last_view_is_gone() -> None:
    kept: list[Any] = []

    class Slicing(Plain):
        def submit_store(self, job: TierJob) -> None:
            kept.append(job.chunks[0][:8])
            super().submit_store(job)

    bench = Bench(Slicing, slots=1)
    bench.store(1)
    # Asked for with the report.
    bench.until(lambda: bench.figures["chunks"] == 1)
    assert bench.held() == (1, 0, 0)
    assert bench.manager.prepare_store(9, keys(2)) is None
    kept.clear()
    bench.until(lambda: bench.held() == (0, 0, 0))
    assert bench.figures["stores"] == 1
    bench.close()


class Threaded(Plain):
    """Moves chunks on a thread a job, as far as `gate` lets it."""

    def __init__(self, context: TierContext) -> None:
        super().__init__(context)
        self.gate = threading.Event()

    def submit_load(self, job: TierJob) -> None:
        threading.Thread(target=self.load, args=(job,)).start()

    def load(self, job: TierJob) -> None:
        assert self.gate.wait(PATIENCE_S)
        super().submit_load(job)
        self.context.notify()


def test_a_tier_with_threads_of_its_own_is_heard_without_a_step() -> None:
    bench = Bench(Threaded)
    assert isinstance(bench.tier, Threaded)
    bench.store(1)
    bench.forget()
    assert bench.ask(1) == [HIT_PENDING]
    bench.manager.end_step()
    bench.tier.gate.set()
    assert bench.manager.wait(PATIENCE_S)
    assert bench.bring(1) == [HIT]
    bench.close()


def test_results_are_polled_for_even_if_nobody_notifies() -> None:
    class Silent(Threaded):
        def load(self, job: TierJob) -> None:
            assert self.gate.wait(PATIENCE_S)
            Plain.submit_load(self, job)

    bench = Bench(Silent)
    assert isinstance(bench.tier, Silent)
    bench.store(1)
    bench.forget()
    assert bench.ask(1) == [HIT_PENDING]
    bench.manager.end_step()
    bench.tier.gate.set()
    assert bench.manager.wait(PATIENCE_S)
    bench.close()


def test_partial_loads_keep_what_came() -> None:
    class Partial(Plain):
        def submit_load(self, job: TierJob) -> None:
            done = self.fill(job)
            del done[keys(2)[0]], done[keys(3)[0]]
            failed = {keys(3)[0]: "missing"}
            self.results.append(JobResult(job.id, done=done, failed=failed))

    bench = Bench(Partial)
    bench.store(1, 2, 3)
    bench.forget()
    assert bench.bring(1, 2, 3) == [HIT, MISS, MISS]
    assert bench.load_failures == {"lost": 1, "missing": 1}
    bench.close()


def test_a_tier_that_has_to_ask_elsewhere() -> None:
    class Slow(Plain):
        def __init__(self, context: TierContext) -> None:
            super().__init__(context)
            self.asked: list[bytes] = []

        def lookup(self, keys: Sequence[bytes]) -> Sequence[int]:
            self.asked += keys
            return [RETRY] * len(keys) if len(self.asked) < 5 else super().lookup(keys)

    bench = Bench(Slow)
    bench.store(1)
    bench.forget()
    assert bench.ask(1) == [HIT_PENDING]
    assert isinstance(bench.tier, Slow)
    assert bench.tier.asked == keys(1) * 5
    bench.close()


def test_look_ups_of_many_requests_are_asked_once() -> None:
    asked: list[bytes] = []
    inside, gate = threading.Event(), threading.Event()

    class Gated(Plain):
        def lookup(self, keys: Sequence[bytes]) -> Sequence[int]:
            asked.extend(keys)
            inside.set()
            assert gate.wait(PATIENCE_S)
            return super().lookup(keys)

    bench = Bench(Gated, lookup_deadline_s=600, load_deadline_s=600)
    for request in range(100, 120):
        assert bench.manager.lookup(request, keys(1, 2, 3)).tolist() == [RETRY] * 3
        assert inside.wait(PATIENCE_S)
    gate.set()
    for request in range(100, 120):
        bench.until(lambda: bench.manager.lookup(request, keys(3)).tolist() == [MISS])  # noqa: B023
    assert sorted(asked) == sorted(keys(1, 2, 3))
    bench.close()


def test_more_look_ups_than_fit_are_misses_and_the_tier_goes_on() -> None:
    inside, gate = threading.Event(), threading.Event()
    asked: list[int] = []

    class Gated(Plain):
        def lookup(self, keys: Sequence[bytes]) -> Sequence[int]:
            asked.append(len(keys))
            inside.set()
            assert gate.wait(PATIENCE_S)
            return super().lookup(keys)

    bench = Bench(Gated, lookup_deadline_s=600, load_deadline_s=600)
    bench.manager.lookup(1, keys(0))
    assert inside.wait(PATIENCE_S)
    answers = bench.manager.lookup(2, keys(*range(1, 40_001)))
    assert {MISS, RETRY} == set(answers.tolist())
    assert (answers == RETRY).sum() == 32_768
    gate.set()
    assert bench.ask(*range(40_000)) == [MISS] * 40_000
    assert max(asked) <= 4096
    bench.close()


def test_an_answer_does_not_outlive_what_it_was_about() -> None:
    class Removing(Plain):
        def __init__(self, context: TierContext) -> None:
            super().__init__(context)
            self.gone: list[bytes] = []

        def take_removed(self) -> Iterable[bytes]:
            gone, self.gone = self.gone, []
            return gone

    bench = Bench(Removing, slots=1)
    assert isinstance(bench.tier, Removing)
    bench.store(1)
    bench.settle()
    bench.store(2)
    bench.settle()
    assert bench.manager.take_events()[-1] == ("stored", "plain", keys(2))
    # The one slot is taken: the tier's HIT for 1 is known, and not used.
    bench.manager.prepare_load(9, keys(2))
    assert bench.ask(1) == [MISS]
    assert bench.manager.stats()["primary"]["promotions_refused"] == 1
    # The tier removes it by itself.
    del bench.tier.kept[keys(1)[0]]
    bench.tier.gone = keys(1)
    bench.tier.context.notify()
    bench.until(lambda: bench.figures["evictions"] == 1)
    assert bench.manager.take_events() == [("removed", "plain", keys(1))]
    bench.manager.complete_load(9, keys(2))
    assert bench.ask(1) == [MISS]
    assert bench.figures["hits"] == 0
    # And it is stored again: not a miss any more.
    bench.store(1)
    bench.forget()
    assert bench.bring(1) == [HIT]
    bench.close()


def test_what_a_store_evicted_is_told() -> None:
    class Small(Plain):
        def submit_store(self, job: TierJob) -> None:
            evicted = list(self.kept)
            self.kept.clear()
            super().submit_store(job)
            result = self.results.pop()
            self.results.append(JobResult(result.job, result.done, evicted=evicted, seconds=0.5))

    bench = Bench(Small)
    bench.store(1)
    bench.settle()
    bench.store(2)
    bench.settle()
    told = [event for event in bench.manager.take_events() if event[1] == "plain"]
    assert told == [
        ("stored", "plain", keys(1)),
        ("removed", "plain", keys(1)),
        ("stored", "plain", keys(2)),
    ]
    assert (bench.figures["evictions"], bench.figures["store_seconds"]) == (1, 1.0)
    assert bench.figures["chunks"] == 1
    bench.close()


def test_a_request_ends_after_its_last_job() -> None:
    heard: list[tuple[str, int]] = []

    class Hearing(Plain):
        def submit_store(self, job: TierJob) -> None:
            heard.append(("store", job.request))
            super().submit_store(job)

        def finish_request(self, request: int) -> None:
            heard.append(("end", request))

    bench = Bench(Hearing)
    bench.store(1)
    bench.store(2)
    bench.until(lambda: len(heard) == 4)
    for request in (1, 2):
        assert heard.index(("store", request)) < heard.index(("end", request))
    bench.close()


def test_two_tiers_in_python_and_one_in_rust() -> None:
    class First(Plain):
        pass

    class Second(Plain):
        pass

    First.made, Second.made = [], []
    kvtier.register_tier("first", First)
    kvtier.register_tier("second", Second)
    tiers: list[dict[str, Any]] = [
        {"type": "first"},
        {"type": "memory", "capacity_bytes": 1 << 20},
        {"type": "second"},
    ]
    manager = kvtier.Manager(kvtier.Region(2, 4096), tiers, key_bytes=KEY_BYTES)
    prepared = manager.prepare_store(1, keys(1))
    assert prepared is not None
    manager.complete_store(1, keys(1))
    assert manager.drain(PATIENCE_S)
    stats = manager.stats()["tiers"]
    assert {name: tier["stores"] for name, tier in stats.items()} == {
        "first": 1,
        "memory": 1,
        "second": 1,
    }
    assert First.made[0].kept == Second.made[0].kept
    manager.shutdown()


def test_a_tier_may_shut_its_manager_down() -> None:
    done = threading.Event()
    managers: list[kvtier.Manager] = []

    class Closing(Plain):
        def touch(self, keys: Sequence[bytes]) -> None:  # noqa: ARG002
            with contextlib.suppress(kvtier.KvTierError):
                managers.pop().shutdown()
            done.set()

    bench = Bench(Closing)
    managers.append(bench.manager)
    bench.manager.touch(1, keys(1))
    assert done.wait(PATIENCE_S)
    with pytest.raises(kvtier.errors.ClosedError):
        bench.manager.end_step()
