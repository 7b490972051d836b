"""A tier to measure: whole batches of chunks out of host memory and back."""

from __future__ import annotations

import resource
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvtier import HIT_PENDING, Manager, Region
from kvtier.errors import TierError

__all__ = ["KEY_BYTES", "TierStore", "cpu_seconds", "numbered_keys", "tier_store"]

KEY_BYTES = 36
_WAIT = 600.0


def numbered_keys(first: int, count: int) -> NDArray[np.uint8]:
    """Keys `first` to `first + count`, told apart by their first bytes."""
    keys = np.zeros((count, KEY_BYTES), np.uint8)
    keys[:, :8] = np.arange(first, first + count, dtype="<u8").view(np.uint8).reshape(count, 8)
    return keys


def cpu_seconds() -> float:
    """Seconds of processor that this process has used, the kernel's work for it included."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


@dataclass
class TierStore:
    """A manager with a tier that holds `count` chunks of `chunk_bytes`."""

    manager: Manager
    count: int
    chunk_bytes: int
    next_key: int = 0

    @property
    def nbytes(self) -> int:
        """Bytes of all chunks."""
        return self.count * self.chunk_bytes

    @property
    def keys(self) -> NDArray[np.uint8]:
        """The keys that were stored last."""
        return numbered_keys(self.next_key - self.count, self.count)

    @property
    def round_trips(self) -> int:
        """Exchanges that look-ups took so far, for a tier behind a network."""
        (tier,) = self.manager.stats()["tiers"].values()
        return int(tier["details"]["round_trips"])

    def store(self) -> float:
        """Stores `count` new chunks out of host memory; returns the seconds until all are there."""
        self.next_key += self.count
        self._empty_host_memory()
        keys = self.keys
        prepared = self.manager.prepare_store(1, keys)
        if prepared is None:
            raise TierError("the region has no room for the chunks of one round")
        began = time.perf_counter()
        self.manager.complete_store(1, keys)
        self._drain()
        seconds = time.perf_counter() - began
        self.manager.request_finished(1)
        return seconds

    def load(self) -> float:
        """Brings the chunks that were stored last back into host memory; returns the seconds."""
        self._empty_host_memory()
        keys = self.keys
        began = time.perf_counter()
        answers = self.manager.lookup(2, keys)
        if not (answers == HIT_PENDING).all():
            raise TierError("chunks that were stored are not in the tier")
        self._drain()
        seconds = time.perf_counter() - began
        self.manager.request_finished(2)
        return seconds

    def _drain(self) -> None:
        if not self.manager.drain(_WAIT):
            raise TierError(f"the tier did not finish within {_WAIT:.0f} s")
        (failures,) = self.manager.stats()["tiers"].values()
        failed = sum(failures["store_failures"].values()) + sum(failures["load_failures"].values())
        if failed or failures["sheds"] or failures["refused"]:
            raise TierError(f"{failed} transfers failed, {failures['sheds']} were shed")

    def _empty_host_memory(self) -> None:
        self.manager.reset()
        self.manager.reset_flushed()


@contextmanager
def tier_store(
    config: Mapping[str, Any], chunk_bytes: int, size: int, region: Region | None = None
) -> Iterator[TierStore]:
    """A tier that is given time and room for `size` bytes of chunks, closed at the end."""
    count = max(1, size // chunk_bytes)
    patient = {
        "max_queued_bytes": 2 * size,
        "load_share": 1.0,
        "load_deadline_s": _WAIT,
        "store_deadline_s": _WAIT,
        "high_water_s_per_mib": 1000.0,
    }
    if region is None:
        region = Region(count, chunk_bytes, prefault_threads=2)
    np.asarray(region)[:] = np.arange(256, dtype=np.uint8)[
        np.arange(region.slots, dtype=np.uint32)[:, None] % 256
    ]
    tiers = [{**patient, **config}]
    manager = Manager(region, tiers, key_bytes=KEY_BYTES, namespace="kvtier bench")
    try:
        yield TierStore(manager, count, chunk_bytes)
    finally:
        manager.shutdown()
