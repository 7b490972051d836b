"""Refuses a run that can not work, before anything was made or imported for it."""

from __future__ import annotations

import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

from kvtier.container import available_memory
from kvtier.demo.options import DemoOptions, DemoSizes, default_threads
from kvtier.demo.workload import Workload, make_workload
from kvtier.errors import ConfigError

__all__ = ["DemoPlan", "plan_demo"]

_MIB = 2**20


@dataclass(frozen=True)
class DemoPlan:
    """A run whose options were checked: the workload and every size filled in."""

    options: DemoOptions
    workload: Workload
    sizes: DemoSizes
    threads: int


def plan_demo(options: DemoOptions) -> DemoPlan:
    """Makes the workload and checks every size against the machine.

    Raises `ConfigError` with the flag to change. Writes nothing.
    """
    workload = make_workload(
        options.sessions,
        options.turns,
        options.context_tokens,
        seed=options.seed,
        texts=options.texts,
    )
    sizes = DemoSizes.of(
        options,
        workload.longest_turn_tokens(options.new_tokens),
        workload.half_resident_tokens(options.new_tokens),
    )
    _check_memory(options, sizes)
    _check_directory(options.directory or Path(tempfile.gettempdir()), sizes.disk_bytes)
    return DemoPlan(options, workload, sizes, options.threads or default_threads())


def _check_memory(options: DemoOptions, sizes: DemoSizes) -> None:
    needed = sizes.host_slots * options.chunk_bytes
    if options.device == "cpu":  # the "GPU" pool, and the one that turns are recomputed in
        needed += (sizes.gpu_blocks + sizes.session_blocks) * options.block_bytes
    available = available_memory()
    if available is not None and needed > available:
        raise ConfigError(
            f"the pools need {needed // _MIB} MiB of memory, but only {available // _MIB} MiB are "
            f"available: lower --host, --gpu-pool or --sessions"
        )


def _check_directory(directory: Path, capacity: int) -> None:
    existing = directory
    while not existing.exists() and existing != existing.parent:
        existing = existing.parent
    if not existing.is_dir():
        raise ConfigError(f"--dir {directory}: {existing} is not a directory; choose another one")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise ConfigError(f"--dir {directory}: no permission to write there; choose another one")
    held = _held_bytes(directory)
    free = shutil.disk_usage(existing).free
    if capacity - held > free:
        raise ConfigError(
            f"--disk asks for {capacity // _MIB} MiB in {directory}, but only {free // _MIB} MiB "
            f"are free there: lower --disk or choose another --dir"
        )


def _held_bytes(directory: Path) -> int:
    """Bytes of the files that a store in `directory` has already."""
    if not (directory / "kvtier.json").is_file():
        return 0
    return sum(path.lstat().st_size for path in directory.iterdir() if path.is_file())
