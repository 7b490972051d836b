"""vLLM's own secondary tiers under kvtier's manager: `fs`, `obj`, `example`, or a package's.

    "secondary_tiers": [{"type": "vllm", "tier": {"type": "fs", "root_dir": "/mnt/kv"}}]

`tier` is what vLLM's `TieringOffloadingSpec` takes; the fields that every tier of kvtier has
(deadlines, breaker, back-pressure) stand beside it. vLLM's tier reads and writes the slots of the
region itself, from its own threads. What differs between the two contracts ends here:

* Calls. All calls come from one thread, kvtier's for this tier, which is what vLLM's tiers ask for.
  A step of vLLM's ends after each look-up and each poll, so that what was asked for gets sent.
* Requests. vLLM's tiers keep what they know by request; kvtier asks for whoever wants a key. Each
  batch of look-ups and each job is a request of its own here, which ends with its answers.
* Slots. kvtier's job is kept until vLLM's tier reports it: a slot of a job that is late or
  cancelled is not used again before. One that the tier raised for stays taken: nobody knows how far
  it got.
* Checksums. vLLM's tiers keep none. They are remembered here, of the chunks that this engine stored
  last, and compared when a chunk comes back. A chunk without one, of an earlier run or of another
  engine, is a miss, or with `serve_unverified` taken as it is. A tier that keeps the bytes it has
  when it is given others (`fs` does) has bytes that do not match if they were computed elsewhere:
  a miss too, and counted as corrupt.
* Removal. vLLM's tiers can not be told to remove a chunk: one that was bad is not asked for again.
* Whose data. vLLM's tiers name their data by parts of its configuration. Here the digest of
  kvtier's namespace is part of the model's name, so engines of vLLM that lay chunks out in another
  way, or another revision, never meet.

Tiers that serve other engines (`p2p`, `kvcr`) need vLLM's own manager and are refused.
Memory: about 250 bytes a remembered checksum.
"""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import time
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from vllm.v1.kv_offload.base import (
    Locality,
    LookupResult,
    Medium,
    OffloadingSpec,
    ReqContext,
    ScheduleEndContext,
)
from vllm.v1.kv_offload.tiering.base import JobResult as TheirResult
from vllm.v1.kv_offload.tiering.base import SecondaryTierManager, TransferJob
from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory

import kvtier
from kvtier._kvtier import chunk_checksum
from kvtier.errors import ConfigError

__all__ = ["VllmTier", "with_vllm_tiers"]

_STEP = ScheduleEndContext((), ())
_ANSWERS = {
    LookupResult.HIT: kvtier.HIT,
    LookupResult.MISS: kvtier.MISS,
    LookupResult.RETRY: kvtier.RETRY,
    LookupResult.HIT_PENDING: kvtier.RETRY,
}
# A batch of look-ups whose rest nobody asks for any more ends after this.
_FORGET_S = 30.0
_FIELDS = ("type", "name", "tier", "serve_unverified", "remembered_chunks")


@dataclasses.dataclass(slots=True)
class _Batch:
    """Keys asked for together: for vLLM's tier, a request."""

    context: ReqContext
    since: float
    open: set[bytes] = dataclasses.field(default_factory=set)


class VllmTier(kvtier.SecondaryTier):
    """A `SecondaryTierManager` of vLLM as a tier of kvtier; see the module."""

    def __init__(
        self,
        context: kvtier.TierContext,
        *,
        tier: Mapping[str, Any],
        region: kvtier.Region,
        spec: OffloadingSpec,
        serve_unverified: bool = False,
        remembered_chunks: int = 1 << 18,
    ) -> None:
        """Opens vLLM's tier over `region`. Raises `ConfigError` with what it refused."""
        super().__init__(context)
        self._serve_unverified = serve_unverified
        self._most_checksums = remembered_chunks
        self._checksums: OrderedDict[bytes, int] = OrderedDict()
        self._bad: set[bytes] = set()
        self._asked: dict[bytes, _Batch] = {}
        self._batches: list[_Batch] = []
        self._jobs: dict[int, tuple[kvtier.TierJob, ReqContext]] = {}
        self._contexts = 0
        named = copy.copy(spec)
        named.config = _named_for(spec.config, context.namespace)
        try:
            self._tier: SecondaryTierManager = SecondaryTierFactory.create_secondary_tier(
                dict(tier), memoryview(region), named
            )
        except Exception as error:
            raise ConfigError(f"tier {context.name!r}: vLLM refused {tier!r}: {error}") from error

    def _begin(self) -> ReqContext:
        self._contexts += 1
        context = ReqContext(f"kvtier {self._contexts}")
        self._tier.on_new_request(context)
        return context

    # Look-ups.

    def lookup(self, keys: Sequence[bytes]) -> Sequence[int]:
        """Asks vLLM's tier for those that may be served; it may say RETRY until it knows."""
        now = time.monotonic()
        fresh: _Batch | None = None
        answers = []
        for key in keys:
            if not self._may_serve(key):
                answers.append(kvtier.MISS)
                continue
            batch = self._asked.get(key)
            if batch is None:
                if fresh is None:
                    fresh = _Batch(self._begin(), now)
                    self._batches.append(fresh)
                batch = fresh
                batch.open.add(key)
                self._asked[key] = batch
            answer = _ANSWERS[self._tier.lookup(key, batch.context)]
            if answer != kvtier.RETRY:
                batch.open.discard(key)
                del self._asked[key]
            answers.append(answer)
        self._tier.on_schedule_end(_STEP)
        self._end_batches(now)
        return answers

    def _may_serve(self, key: bytes) -> bool:
        return key in self._checksums or (self._serve_unverified and key not in self._bad)

    def _end_batches(self, now: float) -> None:
        """Ends batches that are answered, or that were left."""
        kept = []
        for batch in self._batches:
            if batch.open and now - batch.since < _FORGET_S:
                kept.append(batch)
                continue
            for key in batch.open:
                del self._asked[key]
            self._tier.on_request_finished(batch.context)
        self._batches = kept

    # Jobs.

    def submit_store(self, job: kvtier.TierJob) -> None:
        """Hands the job on: vLLM's tier reads the slots."""
        self._tier.submit_store(self._handed(job, is_promotion=False))

    def submit_load(self, job: kvtier.TierJob) -> None:
        """Hands the job on: vLLM's tier writes the slots."""
        self._tier.submit_load(self._handed(job, is_promotion=True))

    def _handed(self, job: kvtier.TierJob, *, is_promotion: bool) -> TransferJob:
        context = self._begin()
        self._jobs[job.id] = (job, context)
        slots = np.asarray(job.slots, dtype=np.int64)
        return TransferJob(job.id, job.keys, slots, is_promotion, context)

    def finished(self) -> Iterable[kvtier.JobResult]:
        """What vLLM's tier reported, each chunk of a load with the checksum it should have."""
        results = []
        for their in self._tier.get_finished_jobs():
            job, context = self._jobs.pop(their.job_id, (None, None))
            if job is None:
                # kvtier counts it: the tier has no such job.
                results.append(kvtier.JobResult(their.job_id))
                continue
            self._tier.on_request_finished(context)
            results.append(self._loaded(job, their) if not job.checksums else _stored(job, their))
            if job.checksums and their.success:
                self._remember(job)
        self._tier.on_schedule_end(_STEP)
        return results

    def _loaded(self, job: kvtier.TierJob, their: TheirResult) -> kvtier.JobResult:
        came = set(job.keys if their.success else their.successful_keys or ())
        done = {
            key: self._checksums[key] if key in self._checksums else chunk_checksum(key, chunk)
            for key, chunk in zip(job.keys, job.chunks, strict=True)
            if key in came and self._may_serve(key)
        }
        # Of what did not come it does not say why.
        failed = {key: "missing" if key in came else "io" for key in job.keys if key not in done}
        return kvtier.JobResult(job.id, done=done, failed=failed, seconds=their.transfer_time)

    def _remember(self, job: kvtier.TierJob) -> None:
        for key, checksum in zip(job.keys, job.checksums, strict=True):
            if key not in self._bad:
                self._checksums[key] = checksum
                self._checksums.move_to_end(key)
        while len(self._checksums) > self._most_checksums:
            self._checksums.popitem(last=False)

    def discard(self, keys: Sequence[bytes]) -> None:
        """They stay where they are, and are not asked for again."""
        for key in keys:
            self._checksums.pop(key, None)
            self._bad.add(key)

    def take_removed(self) -> Iterable[bytes]:
        """What vLLM's tier says it removed; what it stored kvtier knows."""
        removed = [event.keys for event in self._tier.take_events() if event.removed]
        return [key for keys in removed for key in keys]

    def shutdown(self) -> None:
        """Has vLLM's tier end its threads."""
        self._tier.shutdown()
        self._jobs.clear()


class _HostTier(VllmTier):
    medium = "memory"


class _DiskTier(VllmTier):
    medium = "file"


class _RemoteTier(VllmTier):
    medium = "network"
    locality = "remote"


def with_vllm_tiers(
    tiers: Iterable[Mapping[str, Any]], region: kvtier.Region, spec: OffloadingSpec
) -> list[dict[str, Any]]:
    """The settings of tiers, with those of type `"vllm"` as `kvtier.Manager` takes them.

    Raises `ConfigError` for one that can not work under kvtier's manager.
    """
    return [
        _resolved(dict(tier), position, region, spec) if tier.get("type") == "vllm" else dict(tier)
        for position, tier in enumerate(tiers)
    ]


def _resolved(
    given: dict[str, Any], position: int, region: kvtier.Region, spec: OffloadingSpec
) -> dict[str, Any]:
    where = f"tier {position} (vllm)"
    tier = given.get("tier")
    if not isinstance(tier, Mapping) or not isinstance(tier.get("type"), str):
        raise ConfigError(f"{where}: tier is {tier!r}, but must be one of vLLM's, with its `type`")
    for field in ("region", "spec"):
        if field in given:
            raise ConfigError(f"{where}: unknown field `{field}`, expected {', '.join(_FIELDS)}")
    if "backpressure" in tier:
        raise ConfigError(
            f"{where}: backpressure is of vLLM's manager: use high_water_s_per_mib beside `tier`"
        )
    try:
        found = SecondaryTierFactory.get_tier_class(dict(tier))
    except Exception as error:
        raise ConfigError(f"{where}: vLLM refused {tier!r}: {error}") from error
    if found.serve_external_requests is not SecondaryTierManager.serve_external_requests:
        raise ConfigError(
            f"{where}: {tier['type']!r} serves other engines, which only vLLM's own manager does: "
            "use it with TieringOffloadingSpec"
        )
    kind = _kind(found.medium, tier.get("locality"))
    named = {"name": tier["type"], **given}
    return {
        **named,
        "type": f"{__name__}:{kind.__name__}",
        "region": region,
        "spec": spec,
    }


def _kind(medium: Medium | None, locality: Any) -> type[VllmTier]:
    if locality == Locality.REMOTE.value or medium is None:
        return _RemoteTier
    return {Medium.CPU: _HostTier, Medium.STORAGE: _DiskTier}[medium]


def _named_for(config: Any, namespace: str) -> Any:
    digest = hashlib.sha256(namespace.encode()).hexdigest()[:16]
    model = dataclasses.replace(config.model, name=f"{config.model.name}/kvtier-{digest}")
    return dataclasses.replace(config, model=model)


def _stored(job: kvtier.TierJob, their: TheirResult) -> kvtier.JobResult:
    # It does not say which ones failed, or why.
    failed = {} if their.success else dict.fromkeys(job.keys, "io")
    done = job.keys if their.success else ()
    return kvtier.JobResult(job.id, done=done, failed=failed, seconds=their.transfer_time)
