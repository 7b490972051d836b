"""The figures of `Manager.stats` as vLLM's metrics: its names where it has them, `kvtier:` else.

`PRIMARY` and `TIER` are the whole list: a name, a kind, what it says, and how it is read from a
snapshot. Counters go to vLLM as what was added since the last call, so a name that did not change
costs nothing. Tiers are labelled as vLLM labels them, number and name: `0:primary`, `1:file`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import (
    OffloadingConnectorStats,
)
from vllm.v1.kv_offload.base import (
    OffloadingCounterMetadata,
    OffloadingGaugeMetadata,
    OffloadingHistogramMetadata,
    OffloadingMetricMetadata,
)
from vllm.v1.kv_offload.cpu.common import CPUOffloadingMetrics
from vllm.v1.kv_offload.tiering.base import TieringOffloadingMetrics

__all__ = ["Metrics", "metric_definitions"]

_PRIMARY_LABEL = ("0:primary",)
_ALLOCATION_BUCKETS = (1, 4, 16, 64, 256, 1024, 4096, 16384, 65536, 262144)


@dataclass(frozen=True)
class _Figure:
    name: str
    kind: Literal["counter", "gauge"]
    documentation: str
    read: Callable[[dict[str, Any]], float]


def _field(field: str) -> Callable[[dict[str, Any]], float]:
    return lambda stats: stats[field]


def _total(field: str) -> Callable[[dict[str, Any]], float]:
    return lambda stats: sum(stats[field].values())


def _part(*fields: str) -> Callable[[dict[str, Any]], float]:
    return lambda stats: sum(stats[field] for field in fields) / stats["slots"]


def _primary_queries(stats: dict[str, Any]) -> float:
    return float(stats["hits"] + stats["hits_pending"] + stats["misses"] + stats["retries"])


_CPU, _TIERING = CPUOffloadingMetrics, TieringOffloadingMetrics

PRIMARY = (
    _Figure(
        _CPU.CPU_CACHE_USAGE_PERC,
        "gauge",
        "Part of host memory that transfers hold (0.0 idle, 1.0 full).",
        _part("writing", "pinned", "detached"),
    ),
    _Figure(
        _CPU.CPU_CACHE_WRITE_USAGE_PERC,
        "gauge",
        "Part of host memory that is being written.",
        _part("writing"),
    ),
    _Figure(
        _CPU.CPU_CACHE_READ_USAGE_PERC,
        "gauge",
        "Part of host memory that is being read.",
        _part("pinned"),
    ),
    _Figure(
        _TIERING.PROMOTION_ALLOCATION_FAILURES,
        "counter",
        "Chunks of tiers that found no room in host memory.",
        _field("promotions_refused"),
    ),
    _Figure(
        "kvtier:primary_chunks",
        "gauge",
        "Chunks in host memory that can be loaded.",
        _field("ready"),
    ),
    _Figure("kvtier:primary_slots", "gauge", "Chunks that host memory can hold.", _field("slots")),
    _Figure(
        "kvtier:primary_evictions",
        "counter",
        "Chunks that left host memory for others.",
        _field("evictions"),
    ),
    _Figure(
        "kvtier:stores_refused",
        "counter",
        "Stores that found no room, because all of it was in use.",
        _field("stores_refused"),
    ),
    _Figure(
        "kvtier:stored_chunks", "counter", "Chunks stored from the GPU.", _field("stored_chunks")
    ),
    _Figure(
        "kvtier:loaded_chunks", "counter", "Chunks loaded to the GPU.", _field("loaded_chunks")
    ),
)
# Counted for tiers too, so with a label here.
_PRIMARY_LABELLED = (
    _Figure(
        _TIERING.CHUNK_QUERIES,
        "counter",
        "Keys that a tier was asked for; one that comes later is asked for again.",
        _primary_queries,
    ),
    _Figure(
        _TIERING.CHUNK_HITS, "counter", "Keys that a tier was asked for and had.", _field("hits")
    ),
)
_SKIPPED = _Figure(
    _CPU.STORES_SKIPPED,
    "counter",
    "Chunks not stored because they were offered too seldom.",
    _field("not_admitted"),
)

TIER = (
    _Figure(
        _TIERING.CHUNK_QUERIES, "counter", _PRIMARY_LABELLED[0].documentation, _field("lookups")
    ),
    _Figure(_TIERING.CHUNK_HITS, "counter", _PRIMARY_LABELLED[1].documentation, _field("hits")),
    _Figure(
        _TIERING.READ_BYTES, "counter", "Bytes read from a tier into host memory.",
        _field("load_bytes"),
    ),
    _Figure(
        _TIERING.READ_TIME, "counter", "Worker seconds of reading from a tier.",
        _field("load_seconds"),
    ),
    _Figure(
        _TIERING.WRITE_BYTES, "counter", "Bytes written from host memory to a tier.",
        _field("store_bytes"),
    ),
    _Figure(
        _TIERING.WRITE_TIME, "counter", "Worker seconds of writing to a tier.",
        _field("store_seconds"),
    ),
    _Figure(
        _TIERING.PROMOTION_JOB_FAILURES, "counter", "Chunks that could not be read from a tier.",
        _total("load_failures"),
    ),
    _Figure(
        _TIERING.CASCADE_JOB_FAILURES, "counter", "Chunks that could not be written to a tier.",
        _total("store_failures"),
    ),
    _Figure(
        _TIERING.ACTIVE_PROMOTION_JOBS, "gauge", "Reads from a tier under way.",
        _field("loads_in_flight"),
    ),
    _Figure(
        _TIERING.ACTIVE_CASCADE_JOBS, "gauge", "Writes to a tier under way.",
        _field("stores_in_flight"),
    ),
    _Figure(
        _TIERING.BACKPRESSURE_STORE_LATENCY_EMA, "gauge",
        "Moving average of what a store takes, in s/MiB.", _field("store_seconds_per_mib"),
    ),
    _Figure(
        _TIERING.BACKPRESSURE_BLOCKS_DROPPED, "counter",
        "Chunks not written because the tier could not keep up.", _field("sheds"),
    ),
    _Figure("kvtier:tier_used_bytes", "gauge", "Bytes that a tier holds.", _field("used_bytes")),
    _Figure(
        "kvtier:tier_capacity_bytes", "gauge", "Bytes that a tier may hold.",
        _field("capacity_bytes"),
    ),
    _Figure(
        "kvtier:tier_evictions", "counter", "Chunks that left a tier for others.",
        _field("evictions"),
    ),
    _Figure(
        "kvtier:tier_corrupt_chunks", "counter",
        "Chunks whose checksum did not match: never served, removed from the tier.",
        lambda stats: stats["load_failures"].get("corrupt", 0),
    ),
    _Figure(
        "kvtier:tier_breaker_opened", "counter",
        "Times that a tier was switched off because it kept failing.",
        lambda stats: stats["load_breaker_opened"] + stats["store_breaker_opened"],
    ),
    _Figure(
        "kvtier:tier_jobs_overdue", "counter", "Reads and writes that passed their deadline.",
        lambda stats: stats["loads_overdue"] + stats["stores_overdue"],
    ),
    _Figure(
        "kvtier:tier_quarantined_slots", "gauge", "Slots of host memory that late reads hold.",
        _field("quarantined"),
    ),
)  # fmt: skip


def metric_definitions(store_threshold: int) -> dict[str, OffloadingMetricMetadata]:
    """All names that `Metrics.take` may use, as vLLM registers them."""
    definitions: dict[str, OffloadingMetricMetadata] = {
        _CPU.CPU_ALLOCATION_SIZE: OffloadingHistogramMetadata(
            documentation="Chunks that one store needs.", buckets=_ALLOCATION_BUCKETS
        )
    }
    skipped = (_SKIPPED,) if store_threshold > 1 else ()
    for figures, labels in (((*PRIMARY, *skipped), ()), ((*_PRIMARY_LABELLED, *TIER), ("tier",))):
        for figure in figures:
            kind = (
                OffloadingCounterMetadata if figure.kind == "counter" else OffloadingGaugeMetadata
            )
            definitions[figure.name] = kind(figure.documentation, labels)
    return definitions


class Metrics:
    """Turns snapshots into what changed."""

    def __init__(self, store_threshold: int = 1) -> None:
        """`store_threshold` is that of the manager whose snapshots come."""
        self._primary = (*PRIMARY, _SKIPPED) if store_threshold > 1 else PRIMARY
        self._counted: dict[tuple[str, tuple[str, ...]], float] = {}
        self._allocations: list[int] = []

    def allocated(self, chunks: int) -> None:
        """Notes the size of a store."""
        self._allocations.append(chunks)

    def take(self, stats: dict[str, Any]) -> OffloadingConnectorStats:
        """What changed since the last call; `stats` is of `Manager.stats`."""
        changed = OffloadingConnectorStats()
        self._add(changed, self._primary, stats["primary"], ())
        self._add(changed, _PRIMARY_LABELLED, stats["primary"], _PRIMARY_LABEL)
        for number, (name, tier) in enumerate(stats["tiers"].items(), start=1):
            self._add(changed, TIER, tier, (f"{number}:{name}",))
        for chunks in self._allocations:
            changed.observe_histogram(_CPU.CPU_ALLOCATION_SIZE, chunks)
        self._allocations.clear()
        return changed

    def _add(
        self,
        changed: OffloadingConnectorStats,
        figures: tuple[_Figure, ...],
        stats: dict[str, Any],
        label: tuple[str, ...],
    ) -> None:
        for figure in figures:
            value = figure.read(stats)
            if figure.kind == "gauge":
                changed.set_gauge(figure.name, value, label)
                continue
            before = self._counted.get((figure.name, label), 0)
            if value != before:
                self._counted[figure.name, label] = value
                changed.increase_counter(figure.name, value - before, label)
