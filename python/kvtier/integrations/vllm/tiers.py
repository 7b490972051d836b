"""kvtier's tiers under vLLM's own manager, `TieringOffloadingSpec`.

    "secondary_tiers": [{"type": "KVTierSecondaryTier", "module_path": "kvtier.integrations.vllm.tiers",
                         "tier": {"type": "file", "path": "/var/cache/kvtier", "capacity_bytes": 1e12}}]

`tier` is any tier of kvtier (`kvtier.config`), one written in Python too. It is bounded, survives
restarts where its kind does, and gives back the bytes that were stored or nothing: what vLLM's own
tiers leave out. vLLM's `backpressure` works as with those.

* Damage. A chunk that does not have its checksum fails its load; it is removed, and not said to be
  there again until it was stored anew.
* A tier that hangs. vLLM's manager has no deadlines: a request whose chunks are being loaded waits
  until the tier lets go of them. After `load_deadline_s` the tier is asked for nothing more, so
  that no other request begins to wait. kvtier's own manager gives the load up instead.
* A tier that fails is switched off and probed, a tier that does not say in `lookup_deadline_s`
  whether it has a chunk has none.
* Whose data. The scheduler's configuration does not say the model's revision, architecture or
  quantization, or the platform, as kvtier's own plug-in knows them: whatever of that differs needs
  a `path` of its own, or `namespace`. `hash` is vLLM's `--prefix-caching-hash-algo`.

The memory is vLLM's. It is held until the last job has let go of it, and `shutdown` raises when one
did not, upon which vLLM keeps it too.
"""  # noqa: E501

from __future__ import annotations

import itertools
import logging
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from vllm.v1.kv_offload.base import (
    LookupResult,
    OffloadingEvent,
    OffloadingSpec,
    ReqContext,
    RequestOffloadingContext,
)
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager, TransferJob
from vllm.v1.metrics.cache_hit_source import CacheHitSource

import kvtier
from kvtier._kvtier import SoloTier
from kvtier.errors import ConfigError, KeyLengthError
from kvtier.integrations.vllm.events import LOCALITIES, MEDIA, SOURCES
from kvtier.integrations.vllm.identity import key_bytes, namespace_of, seed_is_random

__all__ = ["KVTierSecondaryTier"]

_ANSWERS = {
    kvtier.HIT: LookupResult.HIT,
    kvtier.MISS: LookupResult.MISS,
    kvtier.RETRY: LookupResult.RETRY,
}
# About the primary tier, which is vLLM's here.
_NOT_HERE = ("load_share", "shed", "high_water_s_per_mib", "low_water_s_per_mib", "offload")
_DRAIN_SLICE_S = 3600.0

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Number:
    """A request as the tier knows it; lies on its `ReqContext`."""

    value: int


class KVTierSecondaryTier(SecondaryTierManager):
    """A tier of kvtier as a `SecondaryTierManager`; see the module."""

    _numbers: ClassVar = itertools.count(1)
    """Requests are numbered over all tiers: they share the contexts."""

    def __init__(
        self,
        offloading_spec: OffloadingSpec,
        primary_kv_view: memoryview,
        tier_type: str,
        tier: Mapping[str, Any],
        backpressure_detector: Any = None,
        hash: str = "sha256",
        namespace: str = "",
    ) -> None:
        """Opens the tier. Raises `ConfigError`, `StoreIdentityError` or `StoreLockedError`."""
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        unfit = [field for field in _NOT_HERE if field in tier]
        if unfit:
            raise ConfigError(
                f"tier {tier.get('type')!r}: {unfit[0]} is of kvtier's manager, and this is under "
                "vLLM's: leave it out"
            )
        facts = {"hash": hash, "under": "TieringOffloadingSpec"}
        if seed_is_random(facts):
            _log.warning("%s has a random seed in every process: set PYTHONHASHSEED", hash)
        self._events = offloading_spec.kv_events_config.enable_kv_cache_events
        self._tier = SoloTier(
            primary_kv_view,
            tier,
            key_bytes=key_bytes(facts),
            namespace=namespace_of(offloading_spec.config, facts, namespace),
            events=self._events,
        )
        self._name = str(tier.get("name", tier["type"]))
        self.medium = MEDIA[self._tier.medium]
        self.locality = LOCALITIES[self._tier.locality]
        self.cache_hit_source: CacheHitSource = SOURCES[self._tier.medium]
        self._keys: dict[int, list[bytes]] = {}
        self._refused: list[JobResult] = []
        self._odd_keys = False

    def _number(self, req_context: ReqContext) -> int:
        number: _Number | None = req_context.get_state(_Number)
        if number is None:
            number = _Number(next(self._numbers))
            req_context.set_state(number)
        return number.value

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:  # noqa: ARG002
        """Has no wish: new chunks are enough."""
        return RequestOffloadingContext()

    def on_request_finished(self, req_context: ReqContext) -> None:
        """Tells the tier."""
        self._tier.finish_request(self._number(req_context))

    def lookup(self, key: bytes, req_context: ReqContext) -> LookupResult:
        """Whether the tier has the key and may be asked for it."""
        try:
            return _ANSWERS[self._tier.lookup_key(self._number(req_context), key)]
        except KeyLengthError as error:
            # An engine that was told another hash would stop at every request.
            if not self._odd_keys:
                _log.error("%s: set the tier's hash to vLLM's --prefix-caching-hash-algo", error)
            self._odd_keys = True
            return LookupResult.MISS

    def submit_store(self, job_metadata: TransferJob) -> None:
        """Takes the chunks; ends at once when the tier is switched off or has too much to do."""
        self._submit(self._tier.submit_store, job_metadata)

    def submit_load(self, job_metadata: TransferJob) -> None:
        """Brings the chunks."""
        self._submit(self._tier.submit_load, job_metadata)

    def _submit(self, verb: Any, job: TransferJob) -> None:
        keys = list(job.keys)
        number = self._number(job.req_context)
        try:
            verb(job.job_id, number, keys, job.chunk_ids.tolist())
            self._keys[job.job_id] = keys
        except KeyLengthError:
            # `lookup` says what to do about it.
            self._refused.append(JobResult(job.job_id, success=False))

    def get_finished_jobs(self) -> Iterable[JobResult]:
        """The jobs that ended, once each; of a load, which chunks came."""
        ended = [self._result(*job) for job in self._tier.finished()]
        ended.extend(self._refused)
        self._refused.clear()
        return ended

    def _result(self, job: int, lost: list[int], moved: int, seconds: float) -> JobResult:
        keys = self._keys.pop(job)
        missing = set(lost)
        came = [key for at, key in enumerate(keys) if at not in missing]
        return JobResult(job, not lost, came or None, seconds, moved)

    def touch(self, keys: Collection[bytes], req_context: ReqContext) -> None:  # noqa: ARG002
        """Marks chunks as used."""
        self._tier.touch(list(keys))

    def take_events(self) -> Iterable[OffloadingEvent]:
        """What came and went, under the tier's name."""
        for kind, keys in self._tier.take_events():
            yield OffloadingEvent(
                keys=keys,
                medium=self.medium,
                removed=kind == "removed",
                locality=self.locality,
                ownership=self._name,
            )

    def drain_jobs(self) -> None:
        """Waits until no job touches the memory, however long that is, as vLLM wants it."""
        while not self._tier.wait(_DRAIN_SLICE_S):
            _log.warning("tier %s still works on jobs", self._name)

    def shutdown(self) -> None:
        """Closes the tier. Raises `TierError` when a job still touches the memory."""
        self._tier.shutdown()
