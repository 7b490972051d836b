"""Looking into what a tier keeps, without a manager.

`inspect` says whose data a store holds, how full it is, and how old and how much used its chunks
are; `verify` reads every chunk and compares it with its checksum. `kvtier inspect` and
`kvtier verify` print what these find; `docs/file-format.md` says what is in the directory.
`verify_redis` does the same with the chunks that Redis servers hold, `verify_objects` with a sample
of those in a bucket (`docs/network.md`).
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypedDict, cast

from kvtier._kvtier import ObjectAudit, RedisAudit, StoreAudit, inspect_store
from kvtier.config import jsonable
from kvtier.errors import ConfigError

__all__ = [
    "Distribution",
    "Finding",
    "Inspection",
    "Verification",
    "inspect",
    "verify",
    "verify_objects",
    "verify_redis",
]

# Bytes that are checked between two looks at Ctrl-C and the progress bar.
_STEP_BYTES = 64 << 20
# Objects of a bucket that are.
_STEP_OBJECTS = 8


class Distribution(TypedDict):
    """Chunks by a value: `counts[i]` have `bounds[i]` at most; the last count has the rest."""

    bounds: list[int]
    counts: list[int]


class Inspection(TypedDict):
    """What is in a store. Payloads were not read."""

    format: int
    namespace: Any  # the namespace's JSON, or its text if it is none
    chunk_bytes: int
    key_bytes: int
    capacity_bytes: int  # when it was opened last
    allocated_bytes: int  # of its files
    used_bytes: int  # of its chunks
    slots: int  # chunks that fit
    chunks: int
    damaged_headers: int
    damaged_pages: int  # of the checkpoint and the journal
    oldest: int | None  # when it was written, in seconds since 1970
    newest: int | None
    ages_s: Distribution  # seconds since chunks were written
    hits: Distribution  # how often they were loaded
    owner: str | None  # pid of the process that has it open


@dataclass(frozen=True)
class Finding:
    """Something in a store that is not as it should be."""

    key: bytes | None  # whose chunk, where that can be told
    place: str
    what: str  # which part is bad
    repaired: bool  # whether it was dropped


@dataclass(frozen=True)
class Verification:
    """What a check of a whole store, or of a sample of a bucket, found."""

    chunks: int  # that were checked
    corrupt: list[Finding]  # chunks
    files: list[Finding]  # files, and pages of the checkpoint and the journal

    @property
    def good(self) -> bool:
        """Whether nothing was found."""
        return not self.corrupt and not self.files

    @property
    def repaired(self) -> int:
        """How much of it was dropped."""
        return sum(finding.repaired for finding in (*self.corrupt, *self.files))


def inspect(path: str | os.PathLike[str]) -> Inspection:
    """What is in the store at `path`; somebody may have it open.

    Raises `TierError` when there is no store, and its subclasses for one that can not be read.
    """
    return cast(Inspection, inspect_store(path))


def verify(
    path: str | os.PathLike[str],
    *,
    repair: bool = False,
    progress: Callable[[int, int], None] = lambda _total, _done: None,
) -> Verification:
    """Checks every header and payload of the store at `path`; `repair` drops what is bad.

    `progress` is called with the number of chunks and how many more of them were checked. Raises
    `StoreLockedError` while somebody has the store open, and what `inspect` raises.
    """
    step = max(1, _STEP_BYTES // inspect(path)["chunk_bytes"])
    audit = StoreAudit(path, repair=repair)
    try:
        files = [Finding(*found) for found in audit.check_files()]
        corrupt: list[Finding] = []
        for done in range(0, audit.total, step):
            corrupt += [Finding(*found) for found in audit.check(step)]
            progress(audit.total, min(step, audit.total - done))
        return Verification(audit.total, corrupt, files)
    finally:
        audit.close()


def verify_objects(
    settings: Mapping[str, Any],
    *,
    sample: int = 1000,
    seed: int = 0,
    repair: bool = False,
    progress: Callable[[int, int], None] = lambda _total, _done: None,
) -> Verification:
    """Checks `sample` of the chunks in a bucket, of all namespaces, drawn evenly.

    `settings` are the fields of an object tier, `url` at least. `progress` is as that of `verify`;
    `repair` removes what is bad. Raises `ConfigError` for settings that can not be, `TierError`
    when the bucket can not be read.
    """
    if sample < 1 or seed < 0:
        raise ConfigError(f"sample = {sample} must be at least 1, seed = {seed} at least 0")
    written = json.dumps(dict(settings), default=jsonable)
    audit = ObjectAudit(written, sample=sample, seed=seed, repair=repair)
    corrupt: list[Finding] = []
    for done in range(0, audit.sample, _STEP_OBJECTS):
        corrupt += [Finding(*found) for found in audit.check(_STEP_OBJECTS)]
        progress(audit.sample, min(_STEP_OBJECTS, audit.sample - done))
    return Verification(audit.sample, corrupt, [])


def verify_redis(
    settings: Mapping[str, Any],
    *,
    sample: int | None = None,
    repair: bool = False,
    progress: Callable[[int], None] = lambda _done: None,
) -> Verification:
    """Reads the chunks of Redis servers, `sample` of them if given, and compares them.

    `settings` are those of a redis tier: `url` or `nodes`, `prefix`, and so on. Engines may use the
    servers meanwhile. `repair` removes what is bad; `progress` is called with how many more chunks
    were checked. Raises `TierError` when a server is not
    reached, `ConfigError` for settings that can not be.
    """
    if sample is not None and sample < 1:
        raise ConfigError(f"sample = {sample}: check one chunk or more")
    audit = RedisAudit(json.dumps(settings, default=jsonable), sample=sample, repair=repair)
    chunks = 0
    corrupt: list[Finding] = []
    while (checked := audit.check()) is not None:
        chunks += checked[0]
        corrupt += [Finding(*found) for found in checked[1]]
        progress(checked[0])
    return Verification(chunks, corrupt, [])
