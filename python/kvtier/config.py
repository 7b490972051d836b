"""Every setting of a tier, and every figure of `Manager.stats()`.

Tiers are plain dicts, checked before anything is opened:

| field | tiers | meaning | default |
|---|---|---|---|
| `type` | all | `"memory"` or `"file"` | required |
| `capacity_bytes` | all | bytes the tier may take | required |
| `path` | file | directory, made if absent, owned by one process at a time | required |
| `name` | all | name in figures and events | the type |
| `threads` | all | worker threads, 1 to 64 | 2 |
| `load_deadline_s` | all | seconds after which a load is a miss | 5 |
| `store_deadline_s` | all | seconds after which a store is given up | 30 |
| `max_queued_bytes` | all | bytes of stores under way; more are shed | half the region |

`Manager.stats()` is `{"primary": PrimaryStats, "tiers": {name: TierStats}}`; counters run since
the manager was made.
"""

from __future__ import annotations

import os
from typing import Any, Literal, NotRequired, TypedDict

__all__ = [
    "FileTierConfig",
    "MemoryTierConfig",
    "PrimaryStats",
    "TierStats",
    "jsonable",
]


class _AnyTierConfig(TypedDict):
    capacity_bytes: int
    name: NotRequired[str]
    threads: NotRequired[int]
    load_deadline_s: NotRequired[float]
    store_deadline_s: NotRequired[float]
    max_queued_bytes: NotRequired[int]


class MemoryTierConfig(_AnyTierConfig):
    """Chunks in host memory that the GPU does not reach."""

    type: Literal["memory"]


class FileTierConfig(_AnyTierConfig):
    """Chunks in files of a directory."""

    type: Literal["file"]
    path: str | os.PathLike[str]


class PrimaryStats(TypedDict):
    """The primary tier. Numbers of chunks, or of keys where it says so."""

    slots: int
    ready: int
    writing: int
    pinned: int
    detached: int  # slots that a late job still holds
    requests: int  # requests that loaded or stored and have not ended
    hits: int  # keys looked up and ready
    hits_pending: int  # keys looked up and on their way
    misses: int  # keys looked up and in no tier, or behind a prefix's first miss
    evictions: int
    stored_chunks: int
    loaded_chunks: int
    stores_refused: int  # calls of prepare_store that found no room
    not_admitted: int  # chunks offered less often than store_threshold asks


class TierStats(TypedDict):
    """A secondary tier. Seconds are worker seconds, summed over its threads."""

    medium: str
    capacity_bytes: int
    used_bytes: int
    chunks: int
    hits: int  # promotions started from it
    loads: int
    load_bytes: int
    load_seconds: float
    load_failures: int  # of any cause
    corrupt: int  # of these: came back with other bytes than were stored
    missing: int  # of these: gone when they were wanted
    stores: int
    store_bytes: int
    store_seconds: float
    store_failures: int
    evictions: int
    sheds: int  # chunks not offered to it because it could not keep up
    in_flight: int  # jobs
    queued_bytes: int  # bytes of stores under way
    overdue: int  # jobs that passed their deadline


def jsonable(value: Any) -> str:
    """What JSON has no word for, in a tier's settings: paths become strings.

    Raises `TypeError` for anything that is no path.
    """
    return os.fsdecode(value)
