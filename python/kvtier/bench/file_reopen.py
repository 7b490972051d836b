"""A process that fills a store with small chunks and is killed: `python -m ... DIR CHUNKS`."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from kvtier import Manager, Region
from kvtier.bench.file_store import file_store
from kvtier.bench.tier_store import KEY_BYTES
from kvtier.errors import TierError

__all__ = ["FACTS", "fill_and_kill", "reopen"]

# Where the order of accesses is.
FACTS = ("checkpoint", "journal")
CHUNK = 4096
_BATCH = 8192


def fill_and_kill(directory: Path, chunks: int) -> None:
    """Fills a store in a process of its own that ends by SIGKILL."""
    process = subprocess.run(
        [sys.executable, "-m", __name__, str(directory), str(chunks)],
        capture_output=True,
        text=True,
        check=False,
    )
    if process.returncode != -signal.SIGKILL:
        raise TierError(f"the store could not be filled: {process.stderr.strip()}")


def reopen(directory: Path, chunks: int) -> float:
    """Opens the store and closes it again; returns the seconds that opening took."""
    tier = {"type": "file", "path": directory, "capacity_bytes": _capacity(chunks)}
    region = Region(1, CHUNK)
    began = time.perf_counter()
    manager = Manager(region, [tier], key_bytes=KEY_BYTES, namespace="kvtier bench")
    seconds = time.perf_counter() - began
    found = manager.stats()["tiers"]["file"]["chunks"]
    manager.shutdown()
    if found < chunks:
        raise TierError(f"{found} of {chunks} chunks were found")
    return seconds


def _capacity(chunks: int) -> int:
    return chunks * (CHUNK + 200) + (8 << 20)


def _fill(directory: Path, chunks: int) -> None:
    with file_store(
        directory,
        CHUNK,
        _BATCH * CHUNK,
        capacity_bytes=_capacity(chunks),
        direct=False,
        flush_interval_s=0.2,
    ) as store:
        while store.next_key < chunks:
            store.count = min(_BATCH, chunks - store.next_key)
            store.store()
        while not any((directory / name).read_bytes().strip(b"\0") for name in FACTS):
            time.sleep(0.05)  # until the first flush
        os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    _fill(Path(sys.argv[1]), int(sys.argv[2]))
