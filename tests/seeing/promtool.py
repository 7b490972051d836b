"""promtool, of Debian's package `prometheus`; `make test` installs it where it may."""

from __future__ import annotations

import shutil
import subprocess

import pytest

_PATH = shutil.which("promtool")

needs_promtool = pytest.mark.skipif(
    _PATH is None, reason="no promtool here: install the package prometheus"
)


def promtool(*arguments: str, stdin: str = "") -> str:
    """Runs it; returns what it found wrong."""
    assert _PATH is not None
    done = subprocess.run(
        [_PATH, *arguments], input=stdin, capture_output=True, text=True, timeout=60
    )
    return "" if done.returncode == 0 else done.stdout + done.stderr
