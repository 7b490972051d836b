"""Warnings of the core and of tiers reach `logging`, under the name "kvtier"."""

from __future__ import annotations

import logging
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest
from tests.tiers.plain import KEY_BYTES, PATIENCE_S, Bench, Plain, keys

import kvtier
from kvtier import MISS


class Raising(Plain):
    def touch(self, keys: Sequence[bytes]) -> None:
        raise ValueError(f"planted {len(keys)}")


def heard(caplog: pytest.LogCaptureFixture, part: str) -> list[logging.LogRecord]:
    """Our records. What another test logged last may come in between."""
    ours = (record for record in caplog.records if record.name == "kvtier")
    return [record for record in ours if part in record.getMessage()]


def test_what_a_tier_raises_is_logged_with_its_traceback_once_a_second(
    caplog: pytest.LogCaptureFixture,
) -> None:
    bench = Bench(Raising)
    for _ in range(50):
        bench.manager.touch(1, keys(1, 2))
    bench.until(lambda: bench.faults.get("raised") == 50)
    bench.until(lambda: heard(caplog, "touch raised"))
    first = heard(caplog, "touch raised")[0].getMessage()
    assert first.startswith('tier "plain": touch raised: Traceback (most recent call last)')
    assert first.endswith("ValueError: planted 2")
    assert "test_logs.py" in first
    # All of it took less than a few seconds.
    assert len(heard(caplog, "touch raised")) < 10
    bench.close()


def test_the_core_is_heard(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    disk = {"type": "file", "path": tmp_path, "capacity_bytes": 1 << 20}
    manager = kvtier.Manager(kvtier.Region(2, 4096), [disk], key_bytes=KEY_BYTES)
    assert manager.prepare_store(1, keys(1)) is not None
    manager.complete_store(1, keys(1))
    assert manager.drain(PATIENCE_S)
    with (tmp_path / "segment-00000").open("r+b") as segment:
        segment.write(b"damaged")
    manager.reset()
    manager.reset_flushed()
    manager.lookup(1, keys(1))
    assert manager.drain(PATIENCE_S)
    assert manager.lookup(1, keys(1)).tolist() == [MISS]
    manager.shutdown()
    waiting = threading.Event()
    while not heard(caplog, "load failed"):
        waiting.wait(0.001)
    (record,) = heard(caplog, "load failed")
    assert (record.levelname, record.threadName) == ("WARNING", "kvtier-logs")


def test_a_handler_that_blocks_or_raises_holds_nobody_up() -> None:
    inside, gate = threading.Event(), threading.Event()
    lines: list[str] = []

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())
            inside.set()
            assert gate.wait(PATIENCE_S)
            raise RuntimeError("planted")

    handler = Handler()
    logger = logging.getLogger("kvtier")
    logger.addHandler(handler)
    try:
        bench = Bench(Raising)
        bench.manager.touch(1, keys(1))
        assert inside.wait(PATIENCE_S)
        # The handler is in it, and everything works.
        bench.store(1)
        bench.forget()
        bench.bring(1)
        bench.manager.touch(1, keys(1))
        bench.until(lambda: bench.faults.get("raised") == 2)
        bench.close()
        gate.set()
        second = Bench(Raising)
        second.manager.touch(1, keys(1, 2, 3))
        second.until(lambda: any("planted 3" in line for line in lines))
        second.close()
    finally:
        gate.set()
        logger.removeHandler(handler)


def test_nothing_starts_before_the_first_manager_and_the_last_lines_are_not_lost() -> None:
    code = """
import threading, kvtier
from tests.tiers.test_logs import Raising, Bench, keys
assert threading.active_count() == 1
region = kvtier.Region(1, 4096)
assert threading.active_count() == 1
manager = kvtier.Manager(region)
assert [thread.name for thread in threading.enumerate()[1:]] == ["kvtier-logs"]
manager.shutdown()
bench = Bench(Raising)
bench.manager.touch(1, keys(1))
bench.until(lambda: bench.faults)
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert "ValueError: planted 1" in done.stderr
