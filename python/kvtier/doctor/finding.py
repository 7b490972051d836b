"""What a check is asked, and what it answers."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

__all__ = ["Finding", "Plan", "Status", "bad", "ok", "warn"]

Status = Literal["ok", "warn", "bad"]


@dataclass(frozen=True)
class Plan:
    """What the machine is to be used for."""

    directory: Path | None = None
    """Of a file tier; None leaves the disk out."""
    host_bytes: int | None = None
    """Of the primary tier; None if not known."""
    disk_bytes: int | None = None
    """`capacity_bytes` of the file tier; None if not known."""
    seconds: float = 2.0
    """How long the disk is probed."""
    root: Path = Path("/")
    """Where `proc` and `sys` are."""


@dataclass(frozen=True)
class Finding:
    """What was found, and, unless it is fine, what to do."""

    status: Status
    found: str
    advice: str | None = None


def ok(found: str) -> Finding:
    """Nothing to do."""
    return Finding("ok", found)


def warn(found: str, advice: str) -> Finding:
    """It works, slower or with less than it could."""
    return Finding("warn", found, advice)


def bad(found: str, advice: str) -> Finding:
    """It fails, or will."""
    return Finding("bad", found, advice)
