"""Every setting of a tier, and every figure of `Manager.stats()`.

Tiers are plain dicts, checked before anything is opened:

| field | tiers | meaning | default |
|---|---|---|---|
| `type` | all | a tier that is built in, or a registered one (`docs/tiers.md`) | required |
| `name` | all | name in figures and events | the type |
| `capacity_bytes` | memory, file | bytes the tier may take | required |
| `path` | file | directory, made if absent, owned by one process at a time | required |
| `threads` | memory, file, redis | worker threads, 1 to 64; with io_uring a file tier has one | 2 |
| `policy` | file | which chunks go first, as `Manager(policy=...)` | `"lru"` |
| `io` | file | `"auto"`, `"uring"`, `"threads"` or `"mmap"`, see below | `"auto"` |
| `direct` | file | past the page cache: `"auto"`, `True` or `False` | `"auto"` |
| `flush_interval_s` | file | seconds of stores that a power loss may lose | 5 |
| `min_free_bytes` | file | free bytes of the device that it leaves alone when it grows | 0 |
| `url` | object | `s3://BUCKET/PREFIX`, `gs://...`, `az://...` or `file:///DIRECTORY` | required |
| ... | object | its other fields: `docs/network.md` | |
| `url` | redis | `redis://user:password@host:port/database`; `rediss://` with TLS | or `nodes` |
| `nodes` | redis | list of `host:port` to begin with; any of a cluster | or `url` |
| `username`, `password` | redis | of an ACL user; a password alone: `requirepass` | of `url` |
| `database` | redis | number, stand-alone servers only | that of `url`, or 0 |
| `tls`, `tls_ca` | redis | speak TLS; PEM file of certificates to trust | `url`; the system's |
| `prefix` | redis | first part of all keys on the server | `"kvtier"` |
| `ttl_s` | redis | seconds after which the server drops a chunk | never |
| `connections` | redis | a node for loads, as many for stores; look-ups have two more | 4 |
| `part_bytes` | redis | chunks above this are split into several values | 4 MiB |
| `max_in_flight_bytes` | redis | bytes of all transfers under way | 256 MiB |
| `connect_timeout_s` | redis | seconds for a connection to be made | 1 |
| `response_timeout_s` | redis | seconds without a byte after which a node counts as hanging | 1 |
| `hedge_after_s` | redis | seconds after which a read goes to a replica as well; 0: never | 0.05 |
| `present_for_s`, `absent_for_s` | redis | seconds that a look-up's answer is remembered | 60, 1 |
| `known_keys` | redis | keys that are remembered, 18 to 37 bytes each | 1,000,000 |
| `load_deadline_s` | all | seconds after which a load is a miss | 5 |
| `store_deadline_s` | all | seconds after which a store is given up | 30 |
| `lookup_deadline_s` | all | seconds a request is told RETRY, then a miss | 1; object, redis 0.02 |
| `load_share` | all | part of the primary tier's slots that its loads may hold | 0.5 |
| `max_queued_bytes` | all | bytes of stores under way; more are shed | half the region |
| `shed` | all | which stores are shed, `"newest"` or `"oldest"` | `"newest"` |
| `high_water_s_per_mib` | all | a tier that takes longer for a MiB is under pressure ... | 0.05 |
| `low_water_s_per_mib` | all | ... until it takes less than this | 0.02 |
| `breaker_failures` | all | failed jobs in a row that switch a direction off; 0: never | 5 |
| `breaker_pause_s` | all | seconds until it is probed; doubles with each failed probe | 1 |
| `breaker_max_pause_s` | all | the longest pause | 60 |
| `offload` | all | `"chunk"`: new chunks only; `"request"`: all chunks of a request | `"chunk"` |

A file tier takes its space as it fills, never more than `capacity_bytes`; `docs/file-format.md`
says what is in it and what survives which crash. `io="auto"` is io_uring where the kernel allows
it, else threads; `"mmap"` copies reads out of the page cache, for data that fits into it, and
wants a disk that one trusts (an I/O error while reading ends the process).

A redis tier connects when it is first used: servers that are down are misses. `docs/network.md`
says which server settings matter, how it is sized, and what `details` counts.

Under pressure a tier gets a store only when it has none under way. Loads are never shed. Loads
and stores have a breaker each, since a full disk can still be read.

`Manager.stats()` is `{"primary": PrimaryStats, "tiers": {name: TierStats}}`; counters run since
the manager was made.
"""

from __future__ import annotations

import os
from typing import Any, Literal, NotRequired, TypedDict

__all__ = [
    "FileTierConfig",
    "Latency",
    "MemoryTierConfig",
    "ObjectTierConfig",
    "PrimaryStats",
    "RedisTierConfig",
    "TierLimits",
    "TierStats",
    "jsonable",
]


class TierLimits(TypedDict):
    """What every tier takes; the table of the module says what each does."""

    name: NotRequired[str]
    load_deadline_s: NotRequired[float]
    store_deadline_s: NotRequired[float]
    lookup_deadline_s: NotRequired[float]
    load_share: NotRequired[float]
    max_queued_bytes: NotRequired[int]
    shed: NotRequired[Literal["newest", "oldest"]]
    high_water_s_per_mib: NotRequired[float]
    low_water_s_per_mib: NotRequired[float]
    breaker_failures: NotRequired[int]
    breaker_pause_s: NotRequired[float]
    breaker_max_pause_s: NotRequired[float]
    offload: NotRequired[Literal["chunk", "request"]]


class MemoryTierConfig(TierLimits):
    """Chunks in host memory that the GPU does not reach."""

    type: Literal["memory"]
    capacity_bytes: int
    threads: NotRequired[int]


class FileTierConfig(TierLimits):
    """Chunks in files of a directory."""

    type: Literal["file"]
    path: str | os.PathLike[str]
    capacity_bytes: int
    threads: NotRequired[int]
    policy: NotRequired[str]
    io: NotRequired[Literal["auto", "uring", "threads", "mmap"]]
    direct: NotRequired[Literal["auto"] | bool]
    flush_interval_s: NotRequired[float]
    min_free_bytes: NotRequired[int]


class ObjectTierConfig(TierLimits):
    """Chunks as objects of a bucket; `docs/network.md` says what each field does."""

    type: Literal["object"]
    url: str
    endpoint: NotRequired[str]
    region: NotRequired[str]
    access_key_id: NotRequired[str]
    secret_access_key: NotRequired[str]
    session_token: NotRequired[str]
    allow_http: NotRequired[bool]
    conditional_put: NotRequired[bool]
    part_bytes: NotRequired[int]
    connections: NotRequired[int]
    max_in_flight_bytes: NotRequired[int]
    listing_interval_s: NotRequired[float]
    known_keys: NotRequired[int]
    connect_timeout_s: NotRequired[float]
    idle_timeout_s: NotRequired[float]
    threads: NotRequired[int]


class RedisTierConfig(TierLimits):
    """Chunks in Redis or Valkey, one server or a cluster."""

    type: Literal["redis"]
    url: NotRequired[str]
    nodes: NotRequired[list[str]]
    username: NotRequired[str]
    password: NotRequired[str]
    database: NotRequired[int]
    tls: NotRequired[bool]
    tls_ca: NotRequired[str | os.PathLike[str]]
    prefix: NotRequired[str]
    ttl_s: NotRequired[int]
    connections: NotRequired[int]
    threads: NotRequired[int]
    part_bytes: NotRequired[int]
    max_in_flight_bytes: NotRequired[int]
    connect_timeout_s: NotRequired[float]
    response_timeout_s: NotRequired[float]
    hedge_after_s: NotRequired[float]
    present_for_s: NotRequired[float]
    absent_for_s: NotRequired[float]
    known_keys: NotRequired[int]


class PrimaryStats(TypedDict):
    """The primary tier. Numbers of chunks, or of keys where it says so."""

    slots: int
    ready: int
    writing: int
    pinned: int
    detached: int  # slots that a late job, or the engine since a reset, still holds
    requests: int  # requests that loaded or stored and have not ended
    steps: int  # steps that ended
    hits: int  # keys looked up and ready
    hits_pending: int  # keys looked up and on their way
    misses: int  # keys looked up and in no tier, or behind a prefix's first miss
    retries: int  # keys looked up that a tier could not tell of yet
    evictions: int
    stored_chunks: int
    loaded_chunks: int
    stores_refused: int  # calls of prepare_store that found no room
    promotions_refused: int  # not promoted: no room, or more than the tier's load_share
    not_admitted: int  # chunks offered less often than store_threshold asks


class Latency(TypedDict):
    """How often jobs took how long: `counts[i]` took at most `LATENCY_BUCKETS[i]` seconds."""

    counts: list[int]
    sum: float


class TierStats(TypedDict):
    """A secondary tier. Chunks, unless it says otherwise; seconds are worker seconds."""

    medium: Literal["memory", "file", "network"]
    locality: Literal["local", "remote"]
    capacity_bytes: int
    used_bytes: int
    chunks: int
    lookups: int  # keys it was asked for
    hits: int  # promotions started from it
    lookups_overdue: int  # requests that it told RETRY for too long
    evictions: int
    sheds: int  # not stored in it because it could not keep up
    refused: int  # not offered to it because its breaker was open
    queued_bytes: int  # bytes of stores under way
    quarantined: int  # slots that late loads still hold
    store_seconds_per_mib: float
    under_pressure: bool
    faults: dict[str, int]  # how often it broke the contract, by kind
    details: dict[str, int]  # what else the tier counts: for network tiers, docs/network.md
    loads: int
    load_bytes: int
    load_seconds: float
    load_failures: dict[str, int]  # by cause: lost, io, corrupt, missing, full
    loads_in_flight: int  # jobs
    loads_overdue: int  # jobs that passed their deadline
    load_latency: Latency  # of jobs, from submission to end
    load_breaker: Literal["closed", "open", "half_open"]
    load_breaker_opened: int  # times
    stores: int
    store_bytes: int
    store_seconds: float
    store_failures: dict[str, int]
    stores_in_flight: int
    stores_overdue: int
    store_latency: Latency
    store_breaker: Literal["closed", "open", "half_open"]
    store_breaker_opened: int


def jsonable(value: Any) -> str:
    """What JSON has no word for, in a tier's settings: paths become strings.

    Raises `TypeError` for anything that is no path.
    """
    return os.fsdecode(value)
