"""Tiers in Python when processes fork, spawn, and end."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.tiers.plain import PATIENCE_S, Bench, Plain

from kvtier import HIT, errors

ROOT = Path(__file__).parents[2]


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_fork_is_refused_and_the_child_ends_cleanly() -> None:
    jobs: list[Any] = []

    class Keeping(Plain):
        def submit_load(self, job: Any) -> None:
            jobs.append(job)

    bench = Bench(Keeping)
    bench.store(1)
    bench.forget()
    bench.ask(1)
    bench.manager.end_step()
    bench.until(lambda: jobs)
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            bench.manager.end_step()
        except errors.ForkError as error:
            os.write(writer, str(error).encode())
        # What the tier has of its job goes too, and must neither hang nor crash.
        bench.tier.context.notify()
        jobs.clear()
        del bench
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        message = pipe.read().decode()
    assert os.waitpid(pid, 0)[1] == 0
    assert "spawn" in message
    (job,) = jobs
    Plain.submit_load(bench.tier, job)
    bench.until(lambda: bench.held() == (0, 0, 0))
    bench.close()


def serve(results: Any) -> None:
    class Spawned(Plain):
        pass

    bench = Bench(Spawned)
    bench.store(1, 2)
    bench.forget()
    results.put(bench.bring(1, 2))
    bench.close()


def test_spawn_works() -> None:
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    worker = context.Process(target=serve, args=(results,))
    worker.start()
    assert results.get(timeout=60) == [HIT, HIT]
    worker.join(60)
    assert worker.exitcode == 0


BEGIN = """
import sys, threading, time
from tests.tiers.plain import Bench, Plain
class Tier(Plain):
    stuck = False
    def instead(self): pass
    def lookup(self, keys):
        if self.stuck: self.instead()
        return super().lookup(keys)
    def submit_load(self, job):
        if self.stuck: self.instead()
        super().submit_load(job)
    def shutdown(self): print("shutdown", flush=True)
"""
LIVE = """
bench = Bench(Tier)
bench.store(1)
bench.forget()
"""


@pytest.mark.parametrize(
    ("code", "closes"),
    [
        pytest.param(LIVE, True, id="idle"),
        pytest.param(LIVE + "bench.ask(1); bench.manager.end_step()", True, id="job under way"),
        pytest.param(LIVE + "bench.manager.shutdown()", True, id="shut down"),
        pytest.param(LIVE + "bench.manager.shutdown(); raise SystemExit(0)", True, id="exit"),
        pytest.param(LIVE + "del bench.manager", True, id="dropped"),
        pytest.param(LIVE + "kept = [bench]; kept.append(kept); del bench", True, id="cycle"),
        pytest.param(
            "Tier.instead = lambda self: time.sleep(3600)"
            + LIVE
            + "bench.tier.stuck = True; bench.manager.lookup(9, [b'12345678']); time.sleep(0.1)",
            False,
            id="asleep",
        ),
        pytest.param(
            "def spin(self):\n    while True: pass\nTier.instead = spin"
            + LIVE
            + "bench.tier.stuck = True; bench.manager.lookup(9, [b'12345678']); time.sleep(0.1)",
            False,
            id="spinning",
        ),
        pytest.param(
            LIVE
            + "def call():\n    while True: bench.tier.context.notify(); time.sleep(0)\n"
            + "threading.Thread(target=call, daemon=True).start()",
            True,
            id="notifying",
        ),
    ],
)
def test_an_interpreter_that_ends_with_a_live_manager(code: str, closes: bool) -> None:
    done = subprocess.run(
        [sys.executable, "-X", "faulthandler", "-c", BEGIN + code],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S * 2,
    )
    assert (done.returncode, done.stdout) == (0, "shutdown\n" if closes else ""), done.stderr
    if closes:
        assert done.stderr == ""
    else:
        assert done.stderr.strip().endswith("its thread is left behind")
