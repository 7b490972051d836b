from __future__ import annotations

import os
import pty
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# The same examples in every run, and what fails is printed so that it can be run again.
settings.register_profile(
    "kvtier",
    derandomize=True,
    deadline=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "kvtier"))


OnTerminal = Callable[..., tuple[str, bytes]]


@pytest.fixture
def on_terminal(tmp_path: Path) -> OnTerminal:
    """Runs a kvtier command with a terminal for standard error; gives its output and what the
    terminal showed."""

    def run(*arguments: str, columns: int) -> tuple[str, bytes]:
        ours, theirs = pty.openpty()
        with (tmp_path / "out").open("wb") as out:
            process = subprocess.Popen(
                [sys.executable, "-m", "kvtier", *arguments],
                stdout=out,
                stderr=theirs,
                env={**os.environ, "TERM": "xterm", "COLUMNS": str(columns)},
            )
        os.close(theirs)
        shown = b""
        try:
            while part := os.read(ours, 4096):
                shown += part
        except OSError:  # Linux says EIO when the other end is closed
            pass
        os.close(ours)
        assert process.wait(30) == 0
        return (tmp_path / "out").read_text(), shown

    return run
