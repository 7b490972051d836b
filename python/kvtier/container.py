"""What a container's control group leaves of the machine: memory and processors.

Both versions of control groups are read, the own group and all above it; a limit that no file
tells is no limit. `root` is where `proc` and `sys` are mounted.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

__all__ = ["available_memory", "memory_limit", "processor_limit"]

_ROOT = Path("/")
# Version 1 says "no limit" by a number near 2^63.
_NO_LIMIT = 1 << 60


def memory_limit(root: Path = _ROOT) -> int | None:
    """The lowest limit of memory, in bytes; None where there is none."""
    return min((limit for limit, _ in _memory(root)), default=None)


def available_memory(root: Path = _ROOT) -> int | None:
    """Bytes that the machine and every group can still give; None if neither says."""
    left = [limit - used for limit, used in _memory(root)]
    for line in _text(root / "proc/meminfo").splitlines():
        if line.startswith("MemAvailable:"):
            left.append(int(line.split()[1]) * 1024)
    return min(left, default=None)


def processor_limit(root: Path = _ROOT) -> float | None:
    """The lowest quota of processor time, in processors; None where there is none."""
    quotas = []
    for folder in _groups(root, "cpu"):
        quota, _, period = _text(folder / "cpu.max").partition(" ")
        if not quota:
            quota = _text(folder / "cpu.cfs_quota_us")
            period = _text(folder / "cpu.cfs_period_us")
        if quota.isdecimal() and period.isdecimal():
            quotas.append(int(quota) / int(period))
    return min(quotas, default=None)


def _memory(root: Path) -> Iterator[tuple[int, int]]:
    """Limit and use of every group that has a limit."""
    for folder in _groups(root, "memory"):
        for limit_name, used_name in (
            ("memory.max", "memory.current"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes"),
        ):
            limit, used = _text(folder / limit_name), _text(folder / used_name)
            if limit.isdecimal() and int(limit) < _NO_LIMIT:
                yield int(limit), int(used) if used.isdecimal() else 0


def _groups(root: Path, controller: str) -> Iterator[Path]:
    """The folders of the own group and of those above it."""
    mounted = root / "sys/fs/cgroup"
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, names, path = line.split(":", 2)
        if names and controller not in names.split(","):
            continue
        top = mounted / controller if names else mounted
        own = top / path.lstrip("/")
        # In a container the path may be one of the host, which is not mounted here.
        yield from (folder for folder in (own, *own.parents) if folder.is_relative_to(top))


def _text(path: Path) -> str:
    """The content of a small file, or nothing."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""
