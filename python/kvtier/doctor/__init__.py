"""What slows or breaks kvtier on this machine, and what to do about each.

A check is one function from a `Plan` to a `Finding`. What kvtier would do is found out by having it
done: the file tier is opened with io_uring, with direct I/O, and filled for a moment; host memory
is registered with CUDA. Only limits are read from the system's files. Everything is taken away
again.

`ok`: nothing to do. `warn`: it works, and slower or with less than it could. `bad`: it fails, or
will.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from kvtier.doctor import disk, machine, software
from kvtier.doctor.finding import Finding, Plan, Status, warn
from kvtier.errors import KvTierError

__all__ = ["CHECKS", "Finding", "Plan", "Status", "examine"]

Check = Callable[[Plan], Finding]

CHECKS: dict[str, Check] = {
    "build": software.build,
    "python": software.python,
    "torch": software.torch,
    "vllm": software.vllm,
    "gpu": software.gpu,
    "processes": software.processes,
    "cpu": machine.cpu,
    "container": machine.container,
    "memory": machine.memory,
    "huge_pages": machine.huge_pages,
    "shared_memory": machine.shared_memory,
    "locked_memory": machine.locked_memory,
    "open_files": machine.open_files,
    "io_uring": disk.io_uring,
}
"""What is checked always."""

DISK_CHECKS: dict[str, Check] = {
    "file_system": disk.file_system,
    "free_space": disk.free_space,
    "direct_io": disk.direct_io,
    "disk_speed": disk.disk_speed,
}
"""What is checked of a directory."""


def examine(plan: Plan) -> Iterator[tuple[str, Finding]]:
    """Yields the name and the finding of one check after the other.

    A check that itself fails is a finding too: `warn`, with the reason.
    """
    checks = CHECKS if plan.directory is None else CHECKS | DISK_CHECKS
    for name, check in checks.items():
        try:
            finding = check(plan)
        except (KvTierError, OSError) as error:
            finding = warn(f"could not be checked: {error}", "see what refuses it, and run again")
        yield name, finding
