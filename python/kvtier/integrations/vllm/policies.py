"""kvtier's policies under vLLM's own manager.

    "eviction_policy": "KVTierGittins",
    "cache_policy_module_path": "kvtier.integrations.vllm.policies"

One class a policy, named so that vLLM's own `lru` and `arc` stay theirs. vLLM keeps slots and
states; `kvtier._kvtier.Evictor` keeps the order and says who goes. When a request ends, what it
used is ordered with its tail before its head, and a key that it stored itself does not count as
used again, as under kvtier's own manager. One thing differs from there: vLLM names new keys only
when room was made for them, so a policy that judges by newcomers learns of them one batch later.

A key costs one call into Rust when it comes, is held, and is let go; look-ups cost none.
Memory: vLLM's state of a chunk, and 80 to 200 bytes a key for the policy.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from vllm.v1.kv_offload.base import OffloadKey, ReqContext
from vllm.v1.kv_offload.cpu.policies.base import CachePolicy, ChunkStatus, order_request_keys

from kvtier._kvtier import Evictor

__all__ = [
    "KVTierARC",
    "KVTierAuto",
    "KVTierGittins",
    "KVTierLIRS",
    "KVTierLRU",
    "KVTierPolicy",
    "KVTierS3FIFO",
]


@dataclass(frozen=True)
class _Requester:
    """A request as the policy knows it; lies on its `ReqContext`."""

    number: int


class KVTierPolicy(CachePolicy):
    """What all of them share."""

    policy: ClassVar[str]
    """One of `kvtier._kvtier.POLICIES`."""
    _numbers: ClassVar = itertools.count(1)

    def __init__(self, cache_capacity: int) -> None:
        """For a manager of so many slots."""
        super().__init__(cache_capacity)
        self._chunks: dict[OffloadKey, ChunkStatus] = {}
        # Made with the first key, which says how long keys are.
        self._evictor: Evictor | None = None
        self._storing: ReqContext | None = None

    def get(self, key: OffloadKey) -> ChunkStatus | None:
        """The state of a chunk."""
        return self._chunks.get(key)

    def insert(
        self, key: OffloadKey, chunk: ChunkStatus, req_context: ReqContext | None = None
    ) -> None:
        """A chunk that is being written. 0.32 does not say for whom: it said so just before."""
        if self._evictor is None:
            self._evictor = Evictor(self.cache_capacity, len(key), self.policy)
        self._evictor.insert(_number(req_context or self._storing), key)
        self._chunks[key] = chunk

    def remove(self, key: OffloadKey) -> None:
        """A chunk whose write failed."""
        if self._chunks.pop(key, None) is not None and self._evictor is not None:
            self._evictor.remove(key)

    def mark_evictable(self, key: OffloadKey) -> None:
        """Nobody writes or reads it."""
        if self._evictor is not None:
            self._evictor.let_go(key)

    def mark_non_evictable(self, key: OffloadKey) -> None:
        """Somebody reads it."""
        if self._evictor is not None:
            self._evictor.hold(key)

    def touch(self, keys: Iterable[OffloadKey], req_context: ReqContext) -> None:
        """Chunks were used, the first one most recently."""
        if self._evictor is not None:
            self._evictor.touch(_number(req_context), list(keys))

    def on_store_miss(
        self,
        keys: Iterable[OffloadKey],  # noqa: ARG002
        req_context: ReqContext,
    ) -> None:
        """Absent keys that are about to come: kvtier's policies learn of them by `insert`."""
        self._storing = req_context

    def on_request_finished(
        self,
        key_groups: Sequence[Sequence[OffloadKey]],
        insertion_only_keys: set[OffloadKey],  # noqa: ARG002
        reused_keys: set[OffloadKey],  # noqa: ARG002
        req_context: ReqContext,
    ) -> None:
        """Orders what the request used, its tail to go before its head.

        Which of it the request stored itself the evictor knows: it was the last to use it.
        """
        self._storing = None
        if self._evictor is not None:
            self._evictor.touch(_number(req_context), order_request_keys(key_groups, req_context))
            self._evictor.finish(_number(req_context))

    def evict(
        self, n: int, protected: set[OffloadKey]
    ) -> list[tuple[OffloadKey, ChunkStatus]] | None:
        """Evicts `n` chunks, none of the protected, or nothing at all."""
        if n == 0:
            return []
        if self._evictor is None:
            return None
        gone = self._evictor.evict(n, list(protected))
        return None if gone is None else [(key, self._chunks.pop(key)) for key in gone]

    def clear(self) -> None:
        """Forgets everything, and what was learned."""
        self._chunks.clear()
        self._evictor = None
        self._storing = None


def _number(req_context: ReqContext | None) -> int:
    """The request's number; 0 if it is not known. Wraps as the evictor's numbers do."""
    if req_context is None:
        return 0
    requester: _Requester | None = req_context.get_state(_Requester)
    if requester is None:
        requester = _Requester(next(KVTierPolicy._numbers) % (1 << 32) or 1)
        req_context.set_state(requester)
    return requester.number


class KVTierLRU(KVTierPolicy):
    """Least recently used."""

    policy = "lru"


class KVTierARC(KVTierPolicy):
    """ARC: what was used once against what was used again."""

    policy = "arc"


class KVTierLIRS(KVTierPolicy):
    """LIRS: keeps what comes back soonest."""

    policy = "lirs"


class KVTierS3FIFO(KVTierPolicy):
    """S3-FIFO: newcomers prove themselves in a small queue."""

    policy = "s3fifo"


class KVTierGittins(KVTierPolicy):
    """Gittins: evicts what is least worth waiting for."""

    policy = "gittins"


class KVTierAuto(KVTierPolicy):
    """Follows whichever of the others does best."""

    policy = "auto"
