"""The figures of `Manager.stats` as vLLM's metrics: its names where it has them, `kvtier:` else.

`FIGURES` is the whole list but for one histogram. A figure is read from a snapshot of host memory,
of a tier, or of both; what tiers have is labelled as vLLM labels it, with number and name:
`0:primary`, `1:file`. Counters go to vLLM as what was added since the last call, so a figure that
did not change costs nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import (
    OffloadingConnectorStats,
)
from vllm.v1.kv_offload.base import (
    OffloadingCounterMetadata,
    OffloadingGaugeMetadata,
    OffloadingHistogramMetadata,
    OffloadingMetricMetadata,
)
from vllm.v1.kv_offload.cpu.common import CPUOffloadingMetrics as _Cpu
from vllm.v1.kv_offload.tiering.base import TieringOffloadingMetrics as _Tiering

__all__ = ["FIGURES", "Figure", "Metrics", "metric_definitions"]

_Snapshot = dict[str, Any]
_Read = Callable[[_Snapshot], float]
_Kind = type[OffloadingCounterMetadata] | type[OffloadingGaugeMetadata]

_ALLOCATION_BUCKETS = (1, 4, 16, 64, 256, 1024, 4096, 16384, 65536, 262144)


def _sum(*fields: str) -> _Read:
    return lambda stats: sum(stats[field] for field in fields)


def _part(*fields: str) -> _Read:
    return lambda stats: sum(stats[field] for field in fields) / stats["slots"]


def _of(field: str, *causes: str) -> _Read:
    """Of figures by cause: some of them, or all."""
    return lambda stats: sum(stats[field][cause] for cause in causes or stats[field])


@dataclass(frozen=True)
class Figure:
    """A row of the table: one of `host` and `tier` at least says where it is read."""

    name: str
    kind: _Kind
    documentation: str
    host: _Read | None = None
    tier: _Read | None = None

    @property
    def labels(self) -> tuple[str, ...]:
        """What every tier has is told apart by tier."""
        return ("tier",) if self.tier else ()


_COUNTER, _GAUGE = OffloadingCounterMetadata, OffloadingGaugeMetadata

FIGURES = tuple(
    Figure(name, kind, documentation, host, tier)
    for name, kind, host, tier, documentation in (
        # Host memory.
        (_Cpu.CPU_CACHE_USAGE_PERC, _GAUGE, _part("writing", "pinned", "detached"), None,
         "Part of host memory that transfers hold (0.0 idle, 1.0 full)."),
        (_Cpu.CPU_CACHE_WRITE_USAGE_PERC, _GAUGE, _part("writing"), None,
         "Part of host memory that is being written."),
        (_Cpu.CPU_CACHE_READ_USAGE_PERC, _GAUGE, _part("pinned"), None,
         "Part of host memory that is being read."),
        (_Cpu.STORES_SKIPPED, _COUNTER, _sum("not_admitted"), None,
         "Chunks not stored because they were offered too seldom."),
        (_Tiering.PROMOTION_ALLOCATION_FAILURES, _COUNTER, _sum("promotions_refused"), None,
         "Chunks of tiers that found no room in host memory."),
        ("kvtier:primary_chunks", _GAUGE, _sum("ready"), None,
         "Chunks in host memory that can be loaded."),
        ("kvtier:primary_slots", _GAUGE, _sum("slots"), None,
         "Chunks that host memory can hold."),
        ("kvtier:primary_evictions", _COUNTER, _sum("evictions"), None,
         "Chunks that left host memory for others."),
        ("kvtier:stores_refused", _COUNTER, _sum("stores_refused"), None,
         "Stores that found no room, because all of it was in use."),
        ("kvtier:stored_chunks", _COUNTER, _sum("stored_chunks"), None,
         "Chunks stored from the GPU."),
        ("kvtier:loaded_chunks", _COUNTER, _sum("loaded_chunks"), None,
         "Chunks loaded to the GPU."),
        # Host memory and tiers.
        (_Tiering.CHUNK_QUERIES, _COUNTER,
         _sum("hits", "hits_pending", "misses", "retries"), _sum("lookups"),
         "Keys that a tier was asked for; one that comes later is asked for again."),
        (_Tiering.CHUNK_HITS, _COUNTER, _sum("hits"), _sum("hits"),
         "Keys that a tier was asked for and had."),
        # Tiers.
        (_Tiering.READ_BYTES, _COUNTER, None, _sum("load_bytes"),
         "Bytes read from a tier into host memory."),
        (_Tiering.READ_TIME, _COUNTER, None, _sum("load_seconds"),
         "Worker seconds of reading from a tier."),
        (_Tiering.WRITE_BYTES, _COUNTER, None, _sum("store_bytes"),
         "Bytes written from host memory to a tier."),
        (_Tiering.WRITE_TIME, _COUNTER, None, _sum("store_seconds"),
         "Worker seconds of writing to a tier."),
        (_Tiering.PROMOTION_JOB_FAILURES, _COUNTER, None, _of("load_failures"),
         "Chunks that could not be read from a tier."),
        (_Tiering.CASCADE_JOB_FAILURES, _COUNTER, None, _of("store_failures"),
         "Chunks that could not be written to a tier."),
        (_Tiering.ACTIVE_PROMOTION_JOBS, _GAUGE, None, _sum("loads_in_flight"),
         "Reads from a tier under way."),
        (_Tiering.ACTIVE_CASCADE_JOBS, _GAUGE, None, _sum("stores_in_flight"),
         "Writes to a tier under way."),
        (_Tiering.BACKPRESSURE_STORE_LATENCY_EMA, _GAUGE, None, _sum("store_seconds_per_mib"),
         "Moving average of what a store takes, in s/MiB."),
        (_Tiering.BACKPRESSURE_BLOCKS_DROPPED, _COUNTER, None, _sum("sheds"),
         "Chunks not written because the tier could not keep up."),
        ("kvtier:tier_used_bytes", _GAUGE, None, _sum("used_bytes"),
         "Bytes that a tier holds."),
        ("kvtier:tier_capacity_bytes", _GAUGE, None, _sum("capacity_bytes"),
         "Bytes that a tier may hold."),
        ("kvtier:tier_chunks", _GAUGE, None, _sum("chunks"),
         "Chunks that a tier holds."),
        ("kvtier:tier_evictions", _COUNTER, None, _sum("evictions"),
         "Chunks that left a tier for others."),
        ("kvtier:tier_loaded_chunks", _COUNTER, None, _sum("loads"),
         "Chunks that came from a tier."),
        ("kvtier:tier_stored_chunks", _COUNTER, None, _sum("stores"),
         "Chunks that a tier took."),
        ("kvtier:tier_corrupt_chunks", _COUNTER, None, _of("load_failures", "corrupt"),
         "Chunks whose checksum did not match: never served, removed from the tier."),
        ("kvtier:tier_breaker_opened", _COUNTER, None,
         _sum("load_breaker_opened", "store_breaker_opened"),
         "Times that a tier was switched off because it kept failing."),
        ("kvtier:tier_refused_chunks", _COUNTER, None, _sum("refused"),
         "Chunks not offered to a tier while it was switched off."),
        ("kvtier:tier_jobs_overdue", _COUNTER, None, _sum("loads_overdue", "stores_overdue"),
         "Reads and writes that passed their deadline."),
        ("kvtier:tier_lookups_overdue", _COUNTER, None, _sum("lookups_overdue"),
         "Requests that a tier did not tell in time whether it has their chunks."),
        ("kvtier:tier_faults", _COUNTER, None, _of("faults"),
         "Times that a tier broke its contract."),
        ("kvtier:tier_quarantined_slots", _GAUGE, None, _sum("quarantined"),
         "Slots of host memory that late reads hold."),
    )
)  # fmt: skip


def metric_definitions() -> dict[str, OffloadingMetricMetadata]:
    """All names that `Metrics.take` may use, as vLLM registers them."""
    allocation = OffloadingHistogramMetadata(
        documentation="Chunks that one store needs.", buckets=_ALLOCATION_BUCKETS
    )
    figures = {figure.name: figure.kind(figure.documentation, figure.labels) for figure in FIGURES}
    return {_Cpu.CPU_ALLOCATION_SIZE: allocation, **figures}


class Metrics:
    """Turns snapshots into what changed."""

    def __init__(self) -> None:
        """Nothing was counted yet."""
        self._counted: dict[tuple[str, str], float] = {}
        self._allocations: list[int] = []

    def allocated(self, chunks: int) -> None:
        """Notes the size of a store."""
        self._allocations.append(chunks)

    def take(self, stats: _Snapshot) -> OffloadingConnectorStats:
        """What changed since the last call; `stats` is of `Manager.stats`."""
        changed = OffloadingConnectorStats()
        for chunks in self._allocations:
            changed.observe_histogram(_Cpu.CPU_ALLOCATION_SIZE, chunks)
        self._allocations.clear()
        tiers = [
            (f"{number}:{name}", tier)
            for number, (name, tier) in enumerate(stats["tiers"].items(), start=1)
        ]
        for figure in FIGURES:
            if figure.host:
                self._add(changed, figure, "0:primary", figure.host(stats["primary"]))
            if figure.tier:
                for tier, of_tier in tiers:
                    self._add(changed, figure, tier, figure.tier(of_tier))
        return changed

    def _add(
        self, changed: OffloadingConnectorStats, figure: Figure, tier: str, value: float
    ) -> None:
        labels = (tier,) if figure.labels else ()
        if figure.kind is _GAUGE:
            changed.set_gauge(figure.name, value, labels)
            return
        before = self._counted.get((figure.name, tier), 0)
        if value != before:
            self._counted[figure.name, tier] = value
            changed.increase_counter(figure.name, value - before, labels)
