"""Checks of the processor, of memory, and of the limits that the system sets."""

from __future__ import annotations

import os
import resource
from pathlib import Path

from kvtier.cli.sizes import format_size
from kvtier.container import available_memory, memory_limit, processor_limit
from kvtier.doctor.finding import Finding, Plan, bad, ok, warn

__all__ = [
    "container",
    "cpu",
    "huge_pages",
    "locked_memory",
    "memory",
    "open_files",
    "shared_memory",
]

# Sets of instructions of which one makes a checksum faster than memory; names as in /proc/cpuinfo.
_CARRYLESS = ({"pclmulqdq", "sse4_1"}, {"pmull"})
_CAP_IPC_LOCK = 14
_ENOUGH_LOCKED = 1 << 30
_ENOUGH_FILES = 1024
_SMALL_SHARED = 64 << 20
_LEAST_PROCESSORS = 2


def cpu(plan: Plan) -> Finding:
    """Whether checksums have the instructions that make them fast."""
    known = {"flags", "Features"}  # x86-64, AArch64
    flags: set[str] = set()
    for line in _lines(plan.root / "proc/cpuinfo"):
        name, _, value = line.partition(":")
        if name.strip() in known:
            flags |= set(value.split())
    for instructions in _CARRYLESS:
        if instructions <= flags:
            return ok(f"carry-less multiplication ({', '.join(sorted(instructions))})")
    return warn(
        "no carry-less multiplication: checksums limit every transfer to a disk",
        "let the virtual machine have its host's processor (pclmulqdq, or pmull)",
    )


def container(plan: Plan) -> Finding:
    """Whether a control group leaves two processors, one of them for the tiers."""
    limit, processors = memory_limit(plan.root), processor_limit(plan.root)
    usable = len(os.sched_getaffinity(0))
    here = f"{usable} processors"
    if processors is not None:
        here += f", a quota of {processors:.3g}"
    here += ", no limit of memory" if limit is None else f", {format_size(limit)} of memory"
    if min(usable, usable if processors is None else processors) < _LEAST_PROCESSORS:
        return warn(
            f"{here}: the threads of the tiers take time from the engine's",
            "give the container two processors or more",
        )
    return ok(here)


def memory(plan: Plan) -> Finding:
    """Whether host memory has room for the primary tier."""
    available = available_memory(plan.root)
    if available is None:
        return warn("unknown: /proc/meminfo can not be read", "mount /proc")
    if plan.host_bytes is not None and plan.host_bytes > available:
        return bad(
            f"{format_size(available)} available, {format_size(plan.host_bytes)} wanted",
            "make the primary tier smaller, or raise the container's limit of memory",
        )
    return ok(f"{format_size(available)} available")


def huge_pages(plan: Plan) -> Finding:
    """Whether memory is set aside as huge pages, which the primary region does not use."""
    found = {}
    for line in _lines(plan.root / "proc/meminfo"):
        name, _, value = line.partition(":")
        found[name] = int(value.split()[0]) if value.split() else 0
    free = found.get("HugePages_Free", 0) * found.get("Hugepagesize", 0) * 1024
    if free:
        return warn(
            f"{format_size(free)} are set aside as huge pages, which kvtier does not use",
            "lower vm.nr_hugepages: as ordinary pages this memory could hold chunks",
        )
    return ok("none set aside")


def shared_memory(plan: Plan) -> Finding:
    """Whether /dev/shm is there and of use. The region itself needs none of it."""
    path = plan.root / "dev/shm"
    try:
        found = os.statvfs(path)
    except OSError as error:
        return warn(
            f"{path}: {error.strerror}", "mount a tmpfs there: the engine's workers share by it"
        )
    size = found.f_blocks * found.f_frsize
    if not os.access(path, os.W_OK | os.X_OK):
        return warn(f"{path} can not be written", "give this user access (mode 1777)")
    if size <= _SMALL_SHARED:
        return warn(
            f"{path} has {format_size(size)}: too small for the engine's workers",
            "start the container with --shm-size=8g or --ipc=host (kvtier's region needs none)",
        )
    return ok(
        f"{path} has {format_size(size)}, {format_size(found.f_bavail * found.f_frsize)} free"
    )


def locked_memory(plan: Plan) -> Finding:
    """Whether io_uring may keep the region's pages registered."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    wanted = plan.host_bytes or _ENOUGH_LOCKED
    if soft == resource.RLIM_INFINITY:
        return ok("no limit")
    limit = f"a limit of {format_size(soft)}"
    if soft >= wanted:
        return ok(limit)
    if _has_capability(_CAP_IPC_LOCK, plan.root):
        return ok(f"{limit}, which CAP_IPC_LOCK lifts")
    return warn(
        f"{limit}: host memory beyond it is not registered with io_uring or CUDA, "
        "and its transfers take more time",
        f"ulimit -l unlimited, LimitMEMLOCK=infinity or --ulimit memlock=-1 "
        f"({format_size(wanted)} at least)",
    )


def open_files(plan: Plan) -> Finding:  # noqa: ARG001 - a check
    """Whether a store may open its segments."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < _ENOUGH_FILES:
        return warn(
            f"{soft} open files: a full store has up to some 260 segments, an engine its own files",
            f"ulimit -n {_ENOUGH_FILES} or more (the hard limit is {hard})",
        )
    return ok("no limit" if soft == resource.RLIM_INFINITY else f"{soft}")


def _has_capability(number: int, root: Path) -> bool:
    for line in _lines(root / "proc/self/status"):
        name, _, value = line.partition(":")
        if name == "CapEff":
            return bool(int(value, 16) >> number & 1)
    return False


def _lines(path: Path) -> list[str]:
    """The lines of a file of the kernel; none where it is not there."""
    try:
        return path.read_text().splitlines()
    except OSError:
        return []
