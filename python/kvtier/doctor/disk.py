"""Checks of the disk and of how it is reached, by opening a file tier on it."""

from __future__ import annotations

import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvtier import Manager, Region
from kvtier.bench.file_store import file_store
from kvtier.cli.sizes import format_size
from kvtier.doctor.finding import Finding, Plan, bad, ok, warn
from kvtier.errors import ConfigError, TierError

__all__ = ["direct_io", "disk_speed", "file_system", "free_space", "io_uring"]

_PAGE = 4096
_CHUNK = 1 << 20
_BATCH = 64
# What the probe takes of the disk for a moment.
_PROBE_BYTES = 2 * _BATCH * _CHUNK
# Reading slower than this, a disk brings tokens more slowly than many a GPU computes them.
_SLOW = 0.5e9
_LOW_SPACE = 0.05
_REMOTE = {"nfs", "nfs4", "cifs", "smb3", "ceph", "9p", "virtiofs", "fuse"}


def io_uring(_plan: Plan) -> Finding:
    """Whether the kernel lets a file tier use io_uring."""
    with tempfile.TemporaryDirectory(prefix="kvtier-doctor-") as directory:
        refusal = _refusal(Path(directory), io="uring", direct=False)
    if refusal is None:
        return ok("allowed")
    return warn(
        f"the file tier uses threads, and more processor time ({refusal})",
        "allow it: sysctl kernel.io_uring_disabled=0, and a seccomp profile of the container "
        "that has io_uring_setup, io_uring_enter and io_uring_register",
    )


def file_system(plan: Plan) -> Finding:
    """Whether the directory is on a disk that outlives the container."""
    directory = _directory(plan)
    kind = _mounted(directory, plan.root)
    if kind in ("tmpfs", "ramfs"):
        return warn(f"{directory} is {kind}: it is memory", "use a directory on a disk")
    if kind == "overlay":
        return warn(
            f"{directory} is in the container's own layer, which is slow and goes with it",
            "mount a volume there",
        )
    if kind.partition(".")[0] in _REMOTE:
        return warn(
            f"{directory} is on {kind}, over a network",
            "use a local disk: what a crash leaves, and whose the lock is, depend on the server",
        )
    return ok(f"{directory} is on {kind or 'a file system that /proc does not name'}")


def free_space(plan: Plan) -> Finding:
    """Whether the disk has room for the store."""
    usage = shutil.disk_usage(_directory(plan))
    found = f"{format_size(usage.free)} of {format_size(usage.total)} free"
    if plan.disk_bytes is not None and plan.disk_bytes > usage.free:
        return bad(
            f"{found}, {format_size(plan.disk_bytes)} wanted",
            "lower capacity_bytes, or make room",
        )
    if usage.free < _LOW_SPACE * usage.total:
        return warn(found, "make room, or set min_free_bytes: other programs need some")
    return ok(found)


def direct_io(plan: Plan) -> Finding:
    """Whether the file system lets transfers go past the page cache."""
    with _own_directory(plan) as directory:
        refusal = _refusal(Path(directory), io="threads", direct=True)
    if refusal is None:
        return ok("allowed")
    return warn(
        f"every byte is copied through the page cache, which takes memory ({refusal})",
        "use ext4 or XFS on a local disk",
    )


def disk_speed(plan: Plan) -> Finding:
    """How fast chunks of 1 MiB go to the disk and come back."""
    free = shutil.disk_usage(_directory(plan)).free
    if free < _PROBE_BYTES:
        return bad(
            f"not measured: the probe takes {format_size(_PROBE_BYTES)}, {format_size(free)} "
            "are free",
            "make room",
        )
    with (
        _own_directory(plan) as directory,
        file_store(Path(directory), _CHUNK, _BATCH * _CHUNK) as store,
    ):
        stored = _rate(store.store, store.nbytes, plan.seconds / 2)
        loaded = _rate(store.load, store.nbytes, plan.seconds / 2)
    found = f"stores {stored / 1e9:.2f} GB/s, loads {loaded / 1e9:.2f} GB/s (chunks of 1 MiB)"
    if min(stored, loaded) < _SLOW:
        return warn(
            f"{found}: it may bring tokens more slowly than a GPU computes them",
            "use a faster disk (NVMe), larger chunks, or leave the file tier out",
        )
    return ok(found)


def _rate(run: Callable[[], float], nbytes: int, seconds: float) -> float:
    """Bytes a second: the median of the rounds that fit into `seconds`, one at least."""
    ends = time.monotonic() + seconds
    rates = [nbytes / run()]
    while time.monotonic() < ends:
        rates.append(nbytes / run())
    return statistics.median(rates)


def _refusal(directory: Path, **settings: Any) -> str | None:
    """Why a file tier can not be opened so; None if it can."""
    tier = {"type": "file", "path": directory / "store", "capacity_bytes": 1 << 20, **settings}
    try:
        Manager(Region(1, _PAGE), [tier]).shutdown()
    except (ConfigError, TierError) as error:
        return str(error)
    return None


def _directory(plan: Plan) -> Path:
    if plan.directory is None:
        raise TierError("there is no directory to check")
    return plan.directory


def _own_directory(plan: Plan) -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="kvtier-doctor-", dir=_directory(plan))


def _mounted(directory: Path, root: Path) -> str:
    """The type of the file system that a directory is on; nothing if /proc does not say."""
    place = Path(os.path.realpath(directory))
    best, kind = 0, ""
    for line in (root / "proc/self/mountinfo").read_text().splitlines():
        fields, _, rest = line.partition(" - ")
        # A blank in a name is written as an octal number.
        at = Path(fields.split()[4].encode().decode("unicode_escape"))
        depth = len(at.parts)
        if place.is_relative_to(at) and depth >= best:
            best, kind = depth, rest.split()[0]
    return kind
