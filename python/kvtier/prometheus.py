"""The figures of all managers on this machine, as Prometheus metrics.

`Collector` reads the stats pages (`kvtier.pages`) whenever it is scraped; `kvtier exporter` serves
it. Every figure of `kvtier.config` is exported, under a name and unit that follow Prometheus'
conventions: counters end in `_total`, sizes are bytes, times are seconds. All metrics of a manager
carry `uid`, `pid` and `manager` (its number in the process), those of a secondary tier also `tier`.

Needs `prometheus_client`: `pip install 'kvtier[exporter]'`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
)

from kvtier.pages import Pages, StatsPage, read_pages

__all__ = ["PRIMARY", "TIER", "Collector", "Export"]

_MIB = 1 << 20


@dataclass(frozen=True)
class Export:
    """How a figure becomes samples of a metric."""

    figure: str
    metric: str
    help: str
    family: Callable[..., Any] = CounterMetricFamily
    labels: Mapping[str, str] = field(default_factory=dict)  # that tell it from its siblings
    by: str | None = None  # the label of its parts, of a figure that has several
    scale: float = 1.0


def _lookups(figure: str, result: str) -> Export:
    about = "Keys that were looked up, by what was found."
    return Export(figure, "kvtier_primary_lookups", about, labels={"result": result})


PRIMARY = (
    Export("slots", "kvtier_primary_slots", "Slots of the primary tier.", GaugeMetricFamily),
    Export("ready", "kvtier_primary_ready_chunks", "Chunks that are ready.", GaugeMetricFamily),
    Export(
        "writing",
        "kvtier_primary_writing_chunks",
        "Chunks that are being written.",
        GaugeMetricFamily,
    ),
    Export(
        "pinned",
        "kvtier_primary_pinned_chunks",
        "Ready chunks that a transfer holds.",
        GaugeMetricFamily,
    ),
    Export(
        "detached",
        "kvtier_primary_detached_slots",
        "Slots without a key that a late job, or the engine since a reset, still holds.",
        GaugeMetricFamily,
    ),
    Export(
        "requests",
        "kvtier_open_requests",
        "Requests that loaded or stored and have not ended.",
        GaugeMetricFamily,
    ),
    Export("steps", "kvtier_steps", "Steps of the engine that ended."),
    _lookups("hits", "hit"),
    _lookups("hits_pending", "hit_pending"),
    _lookups("misses", "miss"),
    _lookups("retries", "retry"),
    Export("evictions", "kvtier_primary_evicted_chunks", "Chunks evicted."),
    Export("stored_chunks", "kvtier_primary_stored_chunks", "Chunks that the engine stored."),
    Export("loaded_chunks", "kvtier_primary_loaded_chunks", "Chunks that the engine loaded."),
    Export(
        "stores_refused",
        "kvtier_primary_refused_stores",
        "Calls of prepare_store that found no room.",
    ),
    Export(
        "promotions_refused",
        "kvtier_primary_refused_promotions",
        "Chunks of other tiers that were not promoted: no room, or more than the tier's share.",
    ),
    Export(
        "not_admitted",
        "kvtier_primary_not_admitted_chunks",
        "Chunks that were offered less often than the admission threshold asks.",
    ),
)


def _moved(direction: str) -> tuple[Export, ...]:
    labels = {"direction": direction}
    return (
        Export(
            f"{direction}s",
            "kvtier_tier_moved_chunks",
            "Chunks that were moved: load is from the tier, store to it.",
            labels=labels,
        ),
        Export(
            f"{direction}_bytes", "kvtier_tier_moved_bytes", "Bytes of moved chunks.", labels=labels
        ),
        Export(
            f"{direction}_seconds",
            "kvtier_tier_busy_seconds",
            "Worker time spent on moving chunks.",
            labels=labels,
        ),
        Export(
            f"{direction}_failures",
            "kvtier_tier_failed_chunks",
            "Chunks that were not moved, by cause.",
            labels=labels,
            by="cause",
        ),
        Export(
            f"{direction}s_in_flight",
            "kvtier_tier_running_jobs",
            "Jobs that the tier works on.",
            GaugeMetricFamily,
            labels,
        ),
        Export(
            f"{direction}s_overdue",
            "kvtier_tier_overdue_jobs",
            "Jobs that passed their deadline.",
            labels=labels,
        ),
        Export(
            f"{direction}_latency",
            "kvtier_tier_job_duration_seconds",
            "From the submission of a job to its end, of jobs that ended in time.",
            HistogramMetricFamily,
            labels,
        ),
        Export(
            f"{direction}_breaker",
            "kvtier_tier_breaker",
            "1 for the state that the breaker is in: closed lets jobs through, open none.",
            GaugeMetricFamily,
            labels,
            by="state",
        ),
        Export(
            f"{direction}_breaker_opened",
            "kvtier_tier_breaker_opened",
            "How often the breaker opened.",
            labels=labels,
        ),
    )


TIER = (
    Export(
        "capacity_bytes",
        "kvtier_tier_capacity_bytes",
        "Bytes that the tier may take.",
        GaugeMetricFamily,
    ),
    Export("used_bytes", "kvtier_tier_used_bytes", "Bytes that it takes.", GaugeMetricFamily),
    Export("chunks", "kvtier_tier_chunks", "Chunks that it holds.", GaugeMetricFamily),
    Export("lookups", "kvtier_tier_lookups", "Keys that it was asked for."),
    Export("hits", "kvtier_tier_hits", "Promotions started from it."),
    Export("lookups_overdue", "kvtier_tier_overdue_lookups", "Requests told RETRY for too long."),
    Export("evictions", "kvtier_tier_evicted_chunks", "Chunks that it evicted."),
    Export("sheds", "kvtier_tier_shed_chunks", "Chunks not stored since it could not keep up."),
    Export("refused", "kvtier_tier_refused_chunks", "Chunks not offered: its breaker was open."),
    Export(
        "queued_bytes",
        "kvtier_tier_queued_bytes",
        "Bytes of stores under way.",
        GaugeMetricFamily,
    ),
    Export(
        "quarantined",
        "kvtier_tier_quarantined_slots",
        "Slots that late loads still hold.",
        GaugeMetricFamily,
    ),
    Export(
        "store_seconds_per_mib",
        "kvtier_tier_store_seconds_per_byte",
        "Time that it takes to store a byte, on average: what back-pressure goes by.",
        GaugeMetricFamily,
        scale=1 / _MIB,
    ),
    Export(
        "under_pressure",
        "kvtier_tier_under_pressure",
        "1 while it gets a store only when it has none under way.",
        GaugeMetricFamily,
    ),
    Export(
        "faults",
        "kvtier_tier_faults",
        "How often it broke the contract of a tier, by kind.",
        by="kind",
    ),
    Export(
        "details",
        "kvtier_tier_details",
        "What a tier behind a network counts: requests to servers and causes of failures, by name.",
        by="what",
    ),
    *_moved("load"),
    *_moved("store"),
)


class Collector:
    """Reads all stats pages at each scrape; for a `CollectorRegistry` of prometheus_client."""

    def __init__(self, read: Callable[[], Pages] = read_pages) -> None:
        """`read` gives the pages."""
        self._read = read

    def describe(self) -> list[Any]:
        """Nothing: what there is depends on who runs."""
        return []

    def collect(self) -> Iterator[Any]:
        """The metrics, as of now. Raises `StatsPageError` when there can be no pages."""
        found = self._read()
        families: dict[str, Any] = {}
        unreadable = GaugeMetricFamily(
            "kvtier_unreadable_pages", "Stats pages of live processes that could not be read."
        )
        unreadable.add_metric([], len(found.refused))
        families[unreadable.name] = unreadable
        for page in found.pages:
            _add_page(families, page)
        yield from families.values()


_MANAGER = (
    ("kvtier_slot_bytes", "Bytes of a slot of the primary tier.", "slot_bytes"),
    ("kvtier_manager_start_time_seconds", "When the manager was made, since 1970.", "opened"),
    ("kvtier_last_step_timestamp_seconds", "When its last step ended, since 1970.", "published"),
)


def _add_page(families: dict[str, Any], page: StatsPage) -> None:
    labels = {name: str(page[name]) for name in ("uid", "pid", "manager")}
    about = "1 for each manager, with the version of kvtier that it runs."
    info = Export("", "kvtier_manager_info", about, GaugeMetricFamily)
    _add(families, info, {**labels, "version": page["version"]}, 1)
    for metric, text, name in _MANAGER:
        value = page[name]  # type: ignore[literal-required]
        _add(families, Export(name, metric, text, GaugeMetricFamily), labels, value)
    _add_figures(families, PRIMARY, page, labels, page["stats"]["primary"])
    about = "1 for each tier, with what it keeps chunks on and where."
    info = Export("", "kvtier_tier_info", about, GaugeMetricFamily)
    for name, tier in page["stats"]["tiers"].items():
        tier_labels = {**labels, "tier": name}
        place = {"medium": tier["medium"], "locality": tier["locality"]}
        _add(families, info, {**tier_labels, **place}, 1)
        _add_figures(families, TIER, page, tier_labels, tier)
        if directory := page["directories"].get(name):
            _add_device(families, tier_labels, directory)


def _add_figures(
    families: dict[str, Any],
    exports: tuple[Export, ...],
    page: StatsPage,
    labels: dict[str, str],
    figures: Any,
) -> None:
    for export in exports:
        value = figures.get(export.figure)
        own = {**labels, **export.labels}
        if value is None:  # a page of another version
            continue
        if export.family is HistogramMetricFamily:
            _add_latency(families, export, own, page["latency_buckets"], value)
        elif export.by is None:
            _add(families, export, own, value * export.scale)
        elif isinstance(value, str):
            for state in ("closed", "open", "half_open"):
                _add(families, export, {**own, export.by: state}, int(value == state))
        else:
            for part, count in value.items():
                _add(families, export, {**own, export.by: part}, count)


def _family(families: dict[str, Any], export: Export, labels: dict[str, str]) -> Any:
    if export.metric not in families:
        families[export.metric] = export.family(export.metric, export.help, labels=[*labels])
    return families[export.metric]


def _add(families: dict[str, Any], export: Export, labels: dict[str, str], value: float) -> None:
    _family(families, export, labels).add_metric([*labels.values()], value)


def _add_latency(
    families: dict[str, Any],
    export: Export,
    labels: dict[str, str],
    bounds: list[float],
    latency: dict[str, Any],
) -> None:
    buckets, total = [], 0
    for bound, count in zip((*bounds, float("inf")), latency["counts"], strict=True):
        total += count
        buckets.append(("+Inf" if bound == float("inf") else repr(bound), total))
    family = _family(families, export, labels)
    family.add_metric([*labels.values()], buckets, latency["sum"])


def _add_device(families: dict[str, Any], labels: dict[str, str], directory: str) -> None:
    try:
        device = os.statvfs(directory)
    except OSError:  # gone, or in another container
        return
    for name, text, blocks in (
        ("kvtier_tier_device_size_bytes", "Size of the device of the tier.", device.f_blocks),
        ("kvtier_tier_device_free_bytes", "Bytes free on it.", device.f_bavail),
    ):
        export = Export(name, name, text, GaugeMetricFamily)
        _add(families, export, labels, blocks * device.f_frsize)
