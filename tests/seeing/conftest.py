from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

import kvtier

# Answers each line on its standard input: with what it evaluates to.
PROCESS = """
import sys
import kvtier
region = kvtier.Region(8, 4096)
tiers = [{"type": "memory", "name": "behind", "capacity_bytes": 1 << 20}]
manager = kvtier.Manager(region, tiers, key_bytes=8)
manager.end_step()
print("ready", flush=True)
for line in sys.stdin:
    exec(line)
    print("done", flush=True)
manager.shutdown()
"""


class Process:
    """A process with a manager, which does what it is told."""

    def __init__(self) -> None:
        self.popen = subprocess.Popen(
            [sys.executable, "-c", PROCESS],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._answered("ready")

    def do(self, code: str) -> None:
        assert self.popen.stdin is not None
        self.popen.stdin.write(code + "\n")
        self.popen.stdin.flush()
        self._answered("done")

    def kill(self) -> None:
        self.popen.kill()
        self.popen.wait()
        for pipe in (self.popen.stdin, self.popen.stdout):
            assert pipe is not None
            pipe.close()

    def _answered(self, word: str) -> None:
        assert self.popen.stdout is not None
        assert self.popen.stdout.readline().strip() == word


@pytest.fixture
def directory(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A directory of pages that this test has for itself."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as path:
        monkeypatch.setenv("KVTIER_STATS_DIR", path)
        yield Path(path)


@pytest.fixture
def start(directory: Path) -> Iterator[Callable[[], Process]]:  # noqa: ARG001 (sets the environment)
    """Starts processes with a manager each, whose pages are in `directory`."""
    with ExitStack() as stack:

        def start() -> Process:
            process = Process()
            stack.callback(process.kill)
            return process

        yield start


def make_manager(tiers: list[dict[str, Any]] | None = None, slots: int = 8) -> kvtier.Manager:
    tiers = [{"type": "memory", "capacity_bytes": 1 << 20}] if tiers is None else tiers
    return kvtier.Manager(kvtier.Region(slots, 4096), tiers, key_bytes=8)


def key(number: int) -> bytes:
    return number.to_bytes(8, "little")


def store(manager: kvtier.Manager, *numbers: int) -> None:
    keys = [key(number) for number in numbers]
    assert manager.prepare_store(1, keys) is not None
    manager.complete_store(1, keys)
    assert manager.drain(60)
