"""The scheduler's side: vLLM's `OffloadingManager` on top of `kvtier.Manager`.

Every verb is one call into Rust. What this adds is small:

* Requests. vLLM hands a `ReqContext` to every call; its number, and the batches that are under
  way for it in the order they were prepared (vLLM gives them back as sets), are kept on it, so
  nothing has to be cleaned up here.
* Look-ahead. vLLM asks key by key. When a key is on its way from a tier, the rest of the request's
  keys of that group is asked for in one call, so a slow tier answers a prefix in one round trip
  and the promotions are one batch.
* Short scans. A request with one key on its way waits, whatever is behind it, but vLLM would go on
  and ask for all of that, in every step, so that a manager sees it; ours has seen it. So when vLLM
  scans a prefix (it asked for the key before the pending one just now) the next key is answered
  with MISS, which ends the scan and changes nothing: the scan was deferred already. A window is
  scanned from its end, and gets no such answer.
* Reset. Slots that a worker may still read or write stay taken until it is known that it does
  not: 0.33 says so, on 0.32 the manager waits until the step that carries the flush has returned,
  which is so when as many steps were scheduled after it as may be in flight.

All calls come from the thread of vLLM's scheduler.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import compress
from operator import itemgetter
from typing import Any

from vllm.v1.kv_offload.base import (
    LookupResult,
    OffloadingEvent,
    OffloadingManager,
    OffloadPolicy,
    PrepareStoreOutput,
    ReqContext,
    RequestOffloadingContext,
    ScheduleEndContext,
    TierFilter,
)
from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec
from vllm.v1.metrics.cache_hit_source import CacheHitSource

import kvtier
from kvtier.integrations.vllm.events import SOURCES, offloading_events, tier_matchers
from kvtier.integrations.vllm.metrics import Metrics
from kvtier.integrations.vllm.versions import ANNOUNCES_RESET_FLUSHED

__all__ = ["KVTierOffloadingManager"]

_ANSWERS = tuple(
    answer
    for _, answer in sorted(
        {
            kvtier.MISS: LookupResult.MISS,
            kvtier.HIT: LookupResult.HIT,
            kvtier.HIT_PENDING: LookupResult.HIT_PENDING,
            kvtier.RETRY: LookupResult.RETRY,
        }.items()
    )
)
"""By the numbers that kvtier gives, 0 to 3."""
_HIT = 1
"""Answers above it are those of a key that is not here yet."""
_GROUP_BYTES = 4


@dataclass(slots=True)
class _Served:
    """What a request has under way; lies on its `ReqContext`."""

    number: int
    resets: int
    """Resets that the manager had seen; what is below is void after another one."""
    loading: Sequence[bytes] = ()
    storing: list[Sequence[bytes]] = field(default_factory=list)
    pending: set[bytes] = field(default_factory=set)
    """Keys that were on their way when they were asked for."""
    looked_ahead: int = -1
    """The step in which the rest of its keys was asked for last."""
    run: list[bytes] = field(default_factory=list)
    """The keys around the first one that was on its way then."""

    def forget(self, resets: int) -> None:
        """A reset took what was under way."""
        self.resets = resets
        self.loading = ()
        self.storing.clear()
        self.pending.clear()
        self.run.clear()
        self.looked_ahead = -1


class KVTierOffloadingManager(OffloadingManager):
    """`kvtier.Manager` as vLLM wants it."""

    def __init__(
        self,
        manager: kvtier.Manager,
        *,
        request_level: bool = False,
        events: bool = False,
        batches_in_flight: int = 1,
        drain_seconds: float = 0.0,
        info: Mapping[str, str | int] | None = None,
    ) -> None:
        """Takes `manager` over, and shuts it down.

        `events` says whether it keeps events; `request_level` that one of its tiers wants all
        chunks of a request. `batches_in_flight` is the most steps that vLLM schedules before it
        has the result of the first. `drain_seconds` is how long `shutdown` waits for stores.
        `info` is what `config_info` publishes.
        """
        self._manager = manager
        self._lookup_key = manager.lookup_key
        self._policy = OffloadPolicy.REQUEST_LEVEL if request_level else OffloadPolicy.CHUNK_LEVEL
        self._events = events
        self._batches_in_flight = batches_in_flight
        self._drain_seconds = drain_seconds
        self._info = dict(info or {})
        self._metrics = Metrics()
        self._sources = {
            name: SOURCES[tier["medium"]] for name, tier in manager.stats()["tiers"].items()
        }
        # The revision of the figures that `get_stats` gave last.
        self._reported = -1
        self._requests = 0
        self._resets = 0
        # Whose keys were asked for last: vLLM asks for all keys of a request in a row.
        self._asking: ReqContext | None = None
        self._asking_as = _Served(0, 0)
        self._asked: bytes | None = None
        self._scan_end: bytes | None = None
        self._step = 0
        self._steps_to_flush: int | None = None

    @property
    def manager(self) -> kvtier.Manager:
        """The manager behind this one."""
        return self._manager

    # Requests.

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        """Numbers the request; its tier filter holds for all of its look-ups."""
        self._requests += 1
        req_context.set_state(_Served(self._requests, self._resets))
        if req_context.load_tier_filter is not TierFilter.ALL:
            matchers = tier_matchers(req_context.load_tier_filter)
            self._manager.begin_request(self._requests, tiers=matchers)
        return RequestOffloadingContext(policy=self._policy)

    def _served(self, req_context: ReqContext) -> _Served:
        served: _Served = req_context.get_state(_Served)
        if served.resets != self._resets:
            served.forget(self._resets)
        return served

    def on_request_finished(self, req_context: ReqContext) -> None:
        """Orders what it used, its tail to be evicted before its head."""
        self._asking = None
        self._manager.request_finished(self._served(req_context).number)

    # Look-ups and loads.

    def lookup(self, key: bytes, req_context: ReqContext) -> LookupResult:
        """One call into Rust, and for a request that has to wait, one for all that follows.

        A MISS behind a key that is on its way only ends the scan; see the module.
        """
        if req_context is not self._asking:
            self._asking, self._asking_as = req_context, self._served(req_context)
            self._asked = self._scan_end = None
        elif key == self._scan_end:
            self._scan_end = None
            return LookupResult.MISS
        answer = self._lookup_key(self._asking_as.number, key)
        if answer > _HIT:
            self._look_ahead(key, answer, self._asking_as, req_context)
        self._asked = key
        return _ANSWERS[answer]

    def _look_ahead(
        self, key: bytes, answer: int, served: _Served, req_context: ReqContext
    ) -> None:
        """`key` is on its way, or a tier does not know yet: asks for the keys behind it.

        Of keys on their way once, of a tier that does not know each step.
        """
        again = answer == kvtier.RETRY or key not in served.run
        if again and served.looked_ahead != self._step:
            served.looked_ahead = self._step
            served.pending.add(key)
            group = key[-_GROUP_BYTES:]
            keys = [one for one in req_context._offload_key_positions if one.endswith(group)]
            at = keys.index(key) if key in req_context._offload_key_positions else len(keys)
            # With the key before the pending one, to see which way vLLM goes.
            served.run = keys[max(at - 1, 0) : at + 3] if at else [b"", *keys[:3]]
            behind = keys[at + 1 :]
            if behind:
                answers = self._manager.lookup_prefix(served.number, behind)
                served.pending.update(compress(behind, (answers > _HIT).tolist()))
        for before, one, after in zip(served.run, served.run[1:], served.run[2:], strict=False):
            if one == key and before == self._asked:
                self._scan_end = after

    def get_load_source(self, key: bytes, req_context: ReqContext) -> CacheHitSource:
        """Where a hit came from: its tier if it was on its way when it was asked for."""
        if key not in self._served(req_context).pending:
            return CacheHitSource.HOST
        tier = self._manager.promoted_from(key)
        # On its way from the GPU, for another request.
        return CacheHitSource.HOST if tier is None else self._sources[tier]

    def prepare_load(self, keys: Collection[bytes], req_context: ReqContext) -> CPULoadStoreSpec:
        """Pins the chunks; the spec has their slots."""
        served = self._served(req_context)
        keys = _sequence(keys)
        slots = self._manager.prepare_load(served.number, keys)
        served.loading = keys
        return CPULoadStoreSpec(slots)

    def complete_load(self, keys: Collection[bytes], req_context: ReqContext) -> None:
        """Gives the pins back."""
        served = self._served(req_context)
        loaded, served.loading = served.loading, ()
        self._manager.complete_load(
            served.number, loaded if len(loaded) == len(keys) else _sequence(keys)
        )
        served.pending.clear()
        served.run.clear()
        served.looked_ahead = -1

    def touch(self, keys: Collection[bytes], req_context: ReqContext) -> None:
        """Marks chunks as used."""
        self._manager.touch(self._served(req_context).number, _sequence(keys))

    # Stores.

    def prepare_store(
        self, keys: Collection[bytes], req_context: ReqContext
    ) -> PrepareStoreOutput | None:
        """Reserves slots for the chunks that are not known; None when there is no room."""
        served = self._served(req_context)
        keys = _sequence(keys)
        prepared = self._manager.prepare_store(served.number, keys)
        if prepared is None:
            return None
        new = prepared.indices.tolist()
        if len(new) < len(keys):
            keys = _pick(keys, new)
        if keys:
            served.storing.append(keys)
            self._metrics.allocated(len(keys))
        return PrepareStoreOutput(
            keys_to_store=list(keys),
            store_spec=CPULoadStoreSpec(prepared.slots),
            evicted_keys=prepared.evicted,
        )

    def complete_store(
        self, keys: Collection[bytes], req_context: ReqContext, success: bool = True
    ) -> None:
        """Makes them loadable and sends them to the tiers; without `success`, drops them."""
        served = self._served(req_context)
        self._manager.complete_store(served.number, _in_order(served.storing, keys), success)

    # Steps.

    def on_schedule_end(self, context: ScheduleEndContext) -> None:  # noqa: ARG002
        """Takes what tiers finished, and submits the step's promotions."""
        self._step += 1
        self._asking = None
        if self._steps_to_flush is not None:
            self._steps_to_flush -= 1
            if self._steps_to_flush < 0:
                self.on_reset_flushed()
        self._manager.end_step()

    def has_pending_work(self) -> bool:
        """Whether to step on without requests: only so that events are published in time.

        Tiers need no steps: what they finish is taken by the next step there is.
        """
        return self._events and self._manager.is_busy()

    def reset_cache(self) -> None:
        """Forgets host memory at once; tiers keep what they have."""
        self._resets += 1
        self._asking = None
        self._manager.reset()
        if not ANNOUNCES_RESET_FLUSHED:
            self._steps_to_flush = self._batches_in_flight

    def on_reset_flushed(self) -> None:
        """No transfer from before the reset runs any more."""
        self._steps_to_flush = None
        self._manager.reset_flushed()

    # Figures.

    def take_events(self) -> Iterable[OffloadingEvent]:
        """Chunks that came and went, by tier."""
        return offloading_events(self._manager.take_events(), self._manager.stats)

    def get_stats(self) -> Any:
        """What changed since the last call, under vLLM's names and ours; None if nothing did."""
        revision = self._manager.revision
        if revision == self._reported:
            return None
        self._reported = revision
        return self._metrics.take(self._manager.stats())

    def config_info(self) -> Sequence[Mapping[str, str | int]]:
        """The labels of `vllm:kv_offload_config_info`; only 0.33 asks."""
        return [self._info]

    def shutdown(self) -> None:
        """Lets stores reach their tiers, as long as `drain_seconds`, and closes all."""
        if self._drain_seconds > 0:
            self._manager.drain(self._drain_seconds)
        self._manager.shutdown()


def _sequence(keys: Collection[bytes]) -> Sequence[bytes]:
    return keys if isinstance(keys, list) else list(keys)


def _pick(keys: Sequence[bytes], positions: list[int]) -> Sequence[bytes]:
    if len(positions) < 2:
        return [keys[position] for position in positions]
    return list(itemgetter(*positions)(keys))


def _in_order(batches: list[Sequence[bytes]], keys: Collection[bytes]) -> Sequence[bytes]:
    """The batch that `keys`, a set, were prepared in; it leaves `batches`."""
    for number, batch in enumerate(batches):
        if len(batch) == len(keys) and batch[0] in keys:
            return batches.pop(number)
    return _sequence(keys)
