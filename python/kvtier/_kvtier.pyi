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
    "HostCopier",
    "Manager",
    "PreparedStore",
    "Region",
    "Trace",
    "__version__",
    "build_profile",
]

Keys: TypeAlias = Sequence[bytes] | NDArray[np.uint8]

__version__: Final[str]
build_profile: Final[Literal["debug", "release"]]

# The eviction policies there are, by the names that `Manager` and `Trace.replay` take.
POLICIES: Final[tuple[str, ...]]

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

    `tiers` are plain dicts, fastest first: `{"type": "memory", "capacity_bytes": n}` or
    `{"type": "file", "path": dir, "capacity_bytes": n}`; see `kvtier.config` for every field.
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
class HostCopier:
    """Copies chunks between paged KV cache tensors in host memory and the slots of a region.

    `pages` holds one writable buffer per canonical tensor: int8 or uint8, shape
    `(num_blocks, page_bytes)`, rows contiguous, any positive row stride. It is kept alive. A
    slot holds a chunk as `[tensor][block of the chunk][page_bytes]`, densely from its start.
    Raises `TransferError` when a slot is too small for a chunk.
    """

    def __new__(
        cls,
        region: Region,
        pages: Sequence[Buffer],
        blocks_per_chunk: int,
        *,
        threads: int = 0,
    ) -> HostCopier: ...
    @property
    def chunk_bytes(self) -> int: ...
    def store(self, block_ids: NDArray[np.int64], slots: NDArray[np.uint32]) -> int:
        """Blocks to slots. `block_ids` has shape `(chunks, blocks_per_chunk)`. Returns bytes.

        The caller owns the slots (`prepare_store`). Ids are checked before any byte moves.
        """
    def load(self, block_ids: NDArray[np.int64], slots: NDArray[np.uint32]) -> int:
        """Slots to blocks; a destination block given twice is refused."""

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
