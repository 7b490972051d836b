"""Typed face of the Rust core (`kvtier._kvtier`).

Shapes, units and errors are stated here once. `make test` runs `mypy.stubtest`, so this
file and the compiled extension cannot drift apart.

`Keys` is a sequence of `bytes` that all have `key_bytes` bytes, or one C-contiguous `uint8`
array of shape `(n, key_bytes)`. Every call is a batch call and is safe from any thread.
"""

import os
from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal, TypeAlias, final

import numpy as np
from numpy.typing import NDArray
from typing_extensions import Buffer

__all__ = [
    "HIT",
    "HIT_PENDING",
    "LATENCY_BUCKETS",
    "MISS",
    "POLICIES",
    "RETRY",
    "TIER_TYPES",
    "HostCopier",
    "LogLines",
    "Manager",
    "Moves",
    "ObjectAudit",
    "PreparedStore",
    "RedisAudit",
    "Region",
    "StoreAudit",
    "TierJob",
    "TierPort",
    "Trace",
    "__version__",
    "build_profile",
    "inspect_store",
]

Keys: TypeAlias = Sequence[bytes] | NDArray[np.uint8]

__version__: Final[str]
build_profile: Final[Literal["debug", "release"]]

# The eviction policies there are, by the names that `Manager` and `Trace.replay` take.
POLICIES: Final[tuple[str, ...]]

# The types of tiers that are built in.
TIER_TYPES: Final[tuple[str, ...]]

# Upper ends, in seconds, of the buckets of every `kvtier.config.Latency`.
LATENCY_BUCKETS: Final[tuple[float, ...]]

# What `Manager.lookup` answers, one value a key.
MISS: Final[int]
HIT: Final[int]
HIT_PENDING: Final[int]
RETRY: Final[int]

@final
class Region:
    """The primary region: one shared mapping of shape `(slots, slot_bytes)`, page-aligned.

    Implements the buffer protocol: `memoryview(region)` is writable, two-dimensional and
    uint8; `numpy.asarray(region)` and `kvtier.torch.region_tensor(region)` share it without a
    copy. The mapping lives until the last view, manager and running job let go of it, so it
    can not be unmapped under a transfer.

    `slot_bytes` is rounded up to a multiple of 4096. `kind="memfd"` can be attached by another
    process of the same user through `name`; nothing is left behind when all of them end, even
    by SIGKILL. `kind="anonymous"` can not be attached. `prefault_threads=0` leaves the pages
    untouched until first use. Raises `RegionError` when the memory can not be had.
    """

    def __new__(
        cls,
        slots: int,
        slot_bytes: int,
        *,
        kind: Literal["memfd", "anonymous"] = "memfd",
        prefault_threads: int = 0,
    ) -> Region: ...
    @staticmethod
    def attach(name: str) -> Region:
        """Maps the region that another process made, by its `name`."""
    @property
    def name(self) -> str | None: ...
    @property
    def slots(self) -> int: ...
    @property
    def slot_bytes(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def data_ptr(self) -> int: ...
    def __buffer__(self, flags: int, /) -> memoryview: ...

@final
class PreparedStore:
    """What `Manager.prepare_store` reserved. The caller writes the slots, then completes."""

    @property
    def indices(self) -> NDArray[np.uint32]:
        """Positions, in the keys of the call, of the keys to write; ascending."""
    @property
    def slots(self) -> NDArray[np.uint32]:
        """The slot of each of these keys."""
    @property
    def evicted(self) -> list[bytes]:
        """Keys that left the primary tier to make room."""

@final
class Manager:
    """Decides what moves when between the primary tier and the secondary tiers.

    `tiers` are plain dicts, fastest first: `{"type": "memory", "capacity_bytes": n}`,
    `{"type": "file", "path": dir, "capacity_bytes": n}`, or one of a tier written in Python
    (`kvtier.register_tier`); see `kvtier.config` for every field.
    `namespace` is the identity of the data (model, dtype, layout ...) as canonical JSON; a
    store that was written under another identity is refused with `StoreIdentityError`.
    A chunk is stored when it was offered `store_threshold` times (1 to 255).
    `request` is any number that the engine gives a request.
    """

    def __new__(
        cls,
        region: Region,
        tiers: Sequence[Mapping[str, Any]] = (),
        *,
        policy: str = "lru",
        key_bytes: int = 36,
        namespace: str = "",
        store_threshold: int = 1,
        events: bool = False,
    ) -> Manager: ...
    @property
    def region(self) -> Region: ...
    @property
    def key_bytes(self) -> int: ...
    def begin_request(
        self,
        request: int,
        *,
        tiers: Sequence[Mapping[str, str]] | None = None,
        request_level: Sequence[str] = (),
    ) -> None:
        """Begins a request that is served in a way of its own; without this call it may use all
        tiers.

        `tiers` limits which tiers serve its look-ups: those that any of the matchers matches,
        each `{"medium": ..., "locality": ...}` with both fields optional. `request_level` names
        tiers that get all of its chunks, as if they had `"offload": "request"`.
        """
    def lookup(self, request: int, keys: Keys) -> NDArray[np.uint8]:
        """MISS, HIT, HIT_PENDING or RETRY for every key.

        A key that is absent from the primary tier and held by a secondary one gets a slot and a
        promotion at once, and answers HIT_PENDING until the promotion's completion was polled
        by `end_step`.
        """
    def lookup_key(self, request: int, key: bytes) -> int:
        """As `lookup` for one key: the fastest way to ask for just one."""
    def lookup_prefix(self, request: int, keys: Keys) -> NDArray[np.uint8]:
        """As `lookup`, but stops before the first MISS; the answer may be shorter than `keys`.

        Nothing behind the first MISS is promoted: a prefix without its head is worthless.
        """
    def prepare_load(self, request: int, keys: Keys) -> NDArray[np.uint32]:
        """Pins every key and gives its slot; all keys or none.

        Raises `UnknownKeyError` or `KeyNotReadyError` and pins nothing otherwise.
        """
    def complete_load(self, request: int, keys: Keys) -> None:
        """Gives the pins of `prepare_load` back."""
    def prepare_store(self, request: int, keys: Keys) -> PreparedStore | None:
        """Drops known keys, evicts what is needed and reserves a slot for every other key.

        Known keys go to the tiers that get all chunks of the request (`"offload": "request"`):
        at once, or when they are written. All or nothing: `None`, and nothing changed, when the
        room can not be made now. Keys of the call are never evicted for it. Raises
        `DuplicateKeyError` for a key given twice.
        """
    def complete_store(self, request: int, keys: Keys, ok: bool = True) -> None:
        """Makes prepared keys ready and cascades them to the tiers; `ok=False` drops them."""
    def touch(self, request: int, keys: Keys) -> None:
        """Marks keys as used, the head of the prefix most recently."""
    def request_finished(self, request: int) -> None:
        """Ends a request: its chunks are ordered so that its tail is evicted before its head."""
    def end_step(self) -> None:
        """Polls completions, applies deadlines, and submits one load job per (tier, request)."""
    def is_busy(self) -> bool:
        """Whether a job is in flight, or the next `end_step` has one to submit."""
    def wait(self, timeout: float) -> bool:
        """Waits, without the interpreter's lock, until a job has ended or `timeout` seconds are
        over; False if none ended. It applies nothing: `end_step` does. Returns at once when no
        job is in flight. KeyboardInterrupt is raised within 50 ms."""
    def drain(self, timeout: float) -> bool:
        """Ends steps until no job is queued or in flight; False when `timeout` seconds were
        not enough."""
    def shutdown(self) -> None:
        """Cancels queued jobs, waits for those that touch a slot, closes the tiers. Idempotent;
        every other call raises `ClosedError` afterwards. A worker that does not come back from
        its medium within 5 s is left behind; what it uses lives as long as it does."""
    def reset(self) -> None:
        """Forgets every key of the primary tier at once, without waiting: after new weights,
        before a sleep. Secondary tiers keep what they have.

        Slots that a job or the engine holds stay taken: jobs give theirs back when they end, the
        engine by `reset_flushed`. What was prepared before is void; completing it raises
        `UnknownKeyError`. Until `reset_flushed` no promotion is submitted.
        """
    def reset_flushed(self) -> None:
        """Says that no transfer of the engine from before `reset` runs any more."""
    def take_events(self) -> list[tuple[str, str, list[bytes]]]:
        """`(kind, tier, keys)` since the last call; tier is "primary" or a tier's name. Kinds
        are "stored", "removed", and without keys "load_breaker_open", "..._half_open",
        "..._closed" and the same for "store". Empty unless made with `events=True`."""
    def stats(self) -> dict[str, Any]:
        """One snapshot: `{"primary": PrimaryStats, "tiers": {name: TierStats}}`, typed and
        explained in `kvtier.config`. Works after `shutdown` too."""
    def validate(self) -> None:
        """Walks every invariant of the index; raises `InvariantError` on the first broken one."""

@final
class Moves:
    """Which block goes to, or comes from, which place of which slot; checked when it is made.

    Block `i` of `block_ids` is at place `first + i`, counted over the chunks of `slots` one after
    the other, so the first and the last chunk may be partial. Both are C-contiguous int64 arrays
    of one dimension. Raises `TransferError` for a block or slot that does not exist, a number of
    slots that does not fit, and a destination given twice: a slot where `to_slots`, else a block.
    """

    def __new__(
        cls,
        block_ids: NDArray[np.int64],
        slots: NDArray[np.int64],
        *,
        to_slots: bool,
        num_blocks: int,
        num_slots: int,
        blocks_per_chunk: int,
        first: int = 0,
    ) -> Moves: ...
    def __len__(self) -> int: ...
    @property
    def to_slots(self) -> bool: ...
    @property
    def block_ids(self) -> NDArray[np.int64]:
        """Of every move, a copy."""
    @property
    def slots(self) -> NDArray[np.int64]:
        """Of every move, a copy."""
    @property
    def positions(self) -> NDArray[np.int64]:
        """The place in the slot's chunk of every move, a copy."""

@final
class HostCopier:
    """Copies blocks between KV cache tensors in host memory and the slots of a region.

    `rows` holds one writable buffer per canonical tensor: int8 or uint8, shape
    `(num_blocks, bytes)`, rows contiguous, any positive row stride. It is kept alive. `groups`
    has for each group the bytes of a block in a chunk, and its pieces `(tensor, offset in the
    row, bytes, offset in the block, turns, turn)`: of `turns` ranks with the same bytes, this one
    stores every `turns`-th place. A slot holds its chunk's blocks one behind the other.
    `threads=0`: as many as the machine has, at most 8. Raises `TransferError` when a slot is too
    small for a chunk or a piece does not fit.
    """

    def __new__(
        cls,
        region: Region,
        rows: Sequence[Buffer],
        groups: Sequence[tuple[int, Sequence[tuple[int, int, int, int, int, int]]]],
        *,
        blocks_per_chunk: int,
        threads: int = 0,
    ) -> HostCopier: ...
    def run(self, group: int, moves: Moves) -> int:
        """Makes the moves without the interpreter's lock; returns the bytes it copied.

        The caller owns the destination (`prepare_store`, or blocks of its own), and nobody writes
        the source meanwhile. Raises `TransferError` for moves made for other sizes.
        """

@final
class Trace:
    """Requests of a trace, as the blocks that each one reads; made by `read`.

    Replays are exact counts, the same in every run. Calls leave the interpreter's lock, and
    KeyboardInterrupt is raised within 100 ms. `kvtier.replay` makes curves of them.
    """

    @staticmethod
    def read(path: str | os.PathLike[str]) -> Trace:
        """Reads a trace in the Mooncake format: one JSON object a line, whose `hash_ids` are the
        ids of the request's blocks, chained over the prefix. Empty lines and requests without
        blocks are passed over; a block that a request names twice counts once.

        Raises `ConfigError` with the file and the line for one that is no request, and `OSError`
        for a file that can not be read.
        """
    @property
    def requests(self) -> int: ...
    @property
    def blocks(self) -> int:
        """Block accesses of all requests."""
    @property
    def distinct(self) -> int:
        """Different blocks: a capacity of so many evicts nothing. Counted at every call."""
    def replay(self, policy: str, capacity: int) -> dict[str, Any]:
        """Drives the production index of `capacity` blocks with the trace, from empty.

        Returns counts of `requests`, `blocks` (accesses), `block_hits`, `prefix_hits` (hits
        before the first miss of their request) and `evictions`, and `seconds`. Raises
        `ConfigError` for an unknown policy or a capacity that is not 1 to 2^31 - 1.
        """
    def optimum(self, capacity: int) -> int:
        """The most block hits that any policy can have with `capacity` blocks, even one that
        knows the future: Belady's rule, with the choice not to keep a block at all."""

@final
class TierJob:
    """Chunks that a tier written in Python is to store or to load.

    Its slots stay the job's until the tier has reported it *and* let go of every view: kvtier
    releases the views in `chunks` when the job is reported, and those that the tier made of them
    (slices, numpy arrays) end when the tier drops them. A job that the tier drops without a
    report is lost.
    """

    @property
    def id(self) -> int: ...
    @property
    def request(self) -> int: ...
    @property
    def keys(self) -> list[bytes]: ...
    @property
    def chunks(self) -> list[memoryview]:
        """The bytes of each key, in the primary tier itself: to read when stored, to write when
        loaded. Empty once the job was reported."""
    @property
    def checksums(self) -> list[int]:
        """Of a store, the checksum of each chunk, 64 bits, to be kept with it and given back when
        it is loaded. Empty for a load."""
    @property
    def cancelled(self) -> bool:
        """Whether nobody waits for the job any more: what is left of it may be skipped. It must be
        reported, or dropped, all the same."""

@final
class TierPort:
    """What `kvtier.tiers.thread` drives a tier with; not for others."""

    def begins(self) -> None: ...
    def next(self) -> tuple[str, Any] | None:
        """Waits for the next call to make: its method and its argument. `None`: end."""
    def answer(self, said: object) -> None: ...
    def report(self, results: object) -> bool: ...
    def removed(self, keys: object) -> bool: ...
    def usage(self, usage: object) -> None: ...
    def raised(self, method: str, error: object) -> None: ...
    def notify(self) -> None: ...
    def ends(self) -> None: ...
    def begin_close(self) -> None: ...
    def close(self) -> None: ...

@final
class LogLines:
    """The core's warnings and errors; `kvtier._logs` hands them to `logging`."""

    @staticmethod
    def open() -> LogLines | None: ...
    def next(self) -> tuple[int, str] | None: ...
    def close(self) -> None: ...

def inspect_store(path: str | os.PathLike[str]) -> dict[str, Any]:
    """What is in a file tier's directory, as `kvtier.store.Inspection` lists it.

    Changes nothing; somebody may have the store open. Raises `TierError` when there is no store,
    `StoreFormatError` for another version, `StoreDamagedError` when it does not say whose it is.
    """

@final
class ObjectAudit:
    """Checks objects of a bucket step by step: a sample of those under a URL, drawn with `seed`.

    `settings` is the JSON of an object tier's own fields. The objects are listed at once. With
    `repair` what is bad is removed. Findings are tuples as those of `StoreAudit`.
    """

    def __new__(
        cls, settings: str, *, sample: int, seed: int = 0, repair: bool = False
    ) -> ObjectAudit: ...
    @property
    def objects(self) -> int:
        """Chunks that lie there."""
    @property
    def sample(self) -> int:
        """Chunks that were drawn."""
    def check(self, count: int) -> list[tuple[bytes | None, str, str, bool]]:
        """Reads and checks up to `count` more chunks."""

@final
class RedisAudit:
    """Reads back the chunks that Redis servers hold, and compares them with their headers.

    `settings` is a JSON object of a redis tier's own fields. At most `sample` chunks are read; with
    `repair` bad ones are removed. Findings are those of `StoreAudit`. Raises `TierError` when a
    server is not reached or refuses, `ConfigError` for settings that can not be.
    """

    def __new__(
        cls, settings: str, *, sample: int | None = None, repair: bool = False
    ) -> RedisAudit: ...
    def check(self) -> tuple[int, list[tuple[bytes | None, str, str, bool]]] | None:
        """Checks the chunks of one more page: how many, and what is bad; None after the last."""

@final
class StoreAudit:
    """Checks a file tier's directory step by step, headers and payloads.

    Nobody may have it open (`StoreLockedError`). With `repair` what is bad is dropped. Findings are
    tuples of the key (None where it can not be told), the place, which part is bad, and whether
    it was dropped.
    """

    def __new__(cls, path: str | os.PathLike[str], *, repair: bool = False) -> StoreAudit: ...
    @property
    def total(self) -> int:
        """Headers there are."""
    def check_files(self) -> list[tuple[bytes | None, str, str, bool]]:
        """Checks checkpoint and journal, and that no file is missing."""
    def check(self, count: int) -> list[tuple[bytes | None, str, str, bool]]:
        """Checks up to `count` more chunks."""
    def close(self) -> None:
        """Lets go of the directory."""
