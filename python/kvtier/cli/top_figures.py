"""What `kvtier top` shows of a manager: figures over the last seconds, out of pages read in turn.

A page holds counters that run since the manager was made. `History` keeps what was read in the
last minute, so that a rate is the difference of two readings over the time between them.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypedDict

from kvtier.config import Latency, TierStats
from kvtier.pages import Stats, StatsPage

__all__ = ["History", "ManagerRecord", "MissReason", "TierRecord", "quantile"]

SHORT_S, LONG_S = 10.0, 60.0
# Readings come at intervals: one that is a little older than a window serves it.
_SLACK = 1.1
_MOST_REASONS = 5


class TierRecord(TypedDict):
    """One tier, the primary one included. None: nothing was counted, or not of this tier."""

    name: str
    medium: str
    capacity_bytes: int
    used_bytes: int
    chunks: int
    hit_rate: dict[str, float | None]  # over the last "10s" and "60s", and since the "start"
    store_bytes_per_s: float | None  # to this tier, over 10 s
    load_bytes_per_s: float | None  # from it
    jobs: int | None  # under way
    queued_bytes: int | None  # of stores under way
    load_latency_s: dict[str, float | None] | None  # "p50" and "p99", over 60 s
    breakers: dict[str, str] | None  # of "load" and "store"
    sheds: int | None  # chunks, since the start


class MissReason(TypedDict):
    """Why chunks were not there, or not in time; counts are of chunks unless it says so."""

    tier: str
    reason: str
    last_60s: int
    since_start: int


class ManagerRecord(TypedDict):
    """One manager."""

    pid: int
    manager: int
    command: str
    version: str
    up_s: float
    last_step_s: float  # ago
    steps_per_s: float | None
    requests: int
    tiers: list[TierRecord]
    misses: list[MissReason]  # what counted most, first


@dataclass(frozen=True)
class _Reading:
    at: float
    stats: Stats


class History:
    """The readings of the last minute, by manager."""

    def __init__(self) -> None:
        """Begins without a reading."""
        # Why managers of the last reading are not shown.
        self.refused: list[str] = []
        self._readings: dict[tuple[str, int], deque[_Reading]] = {}

    def add(self, pages: Sequence[StatsPage], now: float) -> list[ManagerRecord]:
        """Takes what was read `now`, on a clock of the caller; returns what to show.

        Managers whose pages are gone are forgotten. Those of another version, without a figure that
        is to be shown, are `refused`.
        """
        present = {}
        records = []
        self.refused = []
        for page in pages:
            manager = (page["path"], page["opened"])
            readings = present[manager] = self._readings.get(manager, deque())
            readings.append(_Reading(now, page["stats"]))
            while readings[0].at < now - LONG_S * _SLACK:
                readings.popleft()
            try:
                records.append(_manager(page, readings))
            except KeyError as figure:
                why = f"its kvtier {page['version']} does not count {figure}"
                self.refused.append(f"{page['path']}: {why}; use the kvtier top of its environment")
        self._readings = present
        return records


def quantile(counts: Sequence[float], bounds: Sequence[float], share: float) -> float | None:
    """The time that a `share` of what was counted took at most, as Prometheus estimates it.

    `counts` has a bucket more than `bounds`: for what took longer than all of them.
    """
    total = sum(counts)
    if not total:
        return None
    wanted, below, low = share * total, 0.0, 0.0
    for count, high in zip(counts, bounds, strict=False):
        if count and below + count >= wanted:
            return low + (high - low) * (wanted - below) / count
        below, low = below + count, high
    return low


@dataclass(frozen=True)
class _Span:
    """The newest reading and one before it."""

    seconds: float
    before: Stats | None
    now: Stats

    def tier(self, name: str) -> tuple[Any, Any]:
        """The figures of a tier before and now; `before` are zeros of no reading."""
        before = None if self.before is None else self.before["tiers"].get(name)
        return before, self.now["tiers"][name]

    def primary(self) -> tuple[Any, Any]:
        return None if self.before is None else self.before["primary"], self.now["primary"]

    def rate(self, figures: tuple[Any, Any], name: str) -> float | None:
        """How much of a counter a second; None of a single reading."""
        if not self.seconds or figures[0] is None:
            return None
        return _more(figures, name) / self.seconds


def _span(readings: Sequence[_Reading], window: float) -> _Span:
    newest = readings[-1]
    inside = (reading for reading in readings if reading.at >= newest.at - window * _SLACK)
    oldest = next(inside)
    if oldest is newest:
        return _Span(0.0, None, newest.stats)
    return _Span(newest.at - oldest.at, oldest.stats, newest.stats)


def _more(figures: tuple[Any, Any], name: str) -> float:
    """By how much a counter grew; a counter that another version lacks stands still."""
    before, now = figures
    return float(now.get(name, 0) - (0 if before is None else before.get(name, 0)))


def _manager(page: StatsPage, readings: Sequence[_Reading]) -> ManagerRecord:
    short, long = _span(readings, SHORT_S), _span(readings, LONG_S)
    spans = {"10s": short, "60s": long, "start": _Span(0.0, None, page["stats"])}
    names = list(page["stats"]["tiers"])
    now = time.time()
    return {
        "pid": page["pid"],
        "manager": page["manager"],
        "command": _command(page["pid"]),
        "version": page["version"],
        "up_s": max(0.0, now - page["opened"]),
        "last_step_s": max(0.0, now - page["published"]),
        "steps_per_s": short.rate(short.primary(), "steps"),
        "requests": page["stats"]["primary"]["requests"],
        "tiers": [_primary(page, spans), *(_tier(page, spans, name) for name in names)],
        "misses": _misses(long, names),
    }


def _primary(page: StatsPage, spans: dict[str, _Span]) -> TierRecord:
    primary, short = page["stats"]["primary"], spans["10s"]
    chunk_bytes = page["slot_bytes"]
    stored = short.rate(short.primary(), "stored_chunks")
    loaded = short.rate(short.primary(), "loaded_chunks")
    taken = primary["ready"] + primary["writing"] + primary["detached"]
    return {
        "name": "primary",
        "medium": "memory",
        "capacity_bytes": primary["slots"] * chunk_bytes,
        "used_bytes": taken * chunk_bytes,
        "chunks": primary["ready"],
        "hit_rate": {
            window: _share(_more(span.primary(), "hits"), _more(span.primary(), "misses"))
            for window, span in _known(spans)
        },
        "store_bytes_per_s": None if stored is None else stored * chunk_bytes,
        "load_bytes_per_s": None if loaded is None else loaded * chunk_bytes,
        "jobs": None,
        "queued_bytes": None,
        "load_latency_s": None,
        "breakers": None,
        "sheds": None,
    }


def _tier(page: StatsPage, spans: dict[str, _Span], name: str) -> TierRecord:
    tier, short = page["stats"]["tiers"][name], spans["10s"]
    hit_rate = {}
    for window, span in _known(spans):
        hits = _more(span.tier(name), "hits")
        hit_rate[window] = _share(hits, _more(span.tier(name), "lookups") - hits)
    return {
        "name": name,
        "medium": tier["medium"],
        "capacity_bytes": tier["capacity_bytes"],
        "used_bytes": tier["used_bytes"],
        "chunks": tier["chunks"],
        "hit_rate": hit_rate,
        "store_bytes_per_s": short.rate(short.tier(name), "store_bytes"),
        "load_bytes_per_s": short.rate(short.tier(name), "load_bytes"),
        "jobs": tier["loads_in_flight"] + tier["stores_in_flight"],
        "queued_bytes": tier["queued_bytes"],
        "load_latency_s": _latency(spans["60s"], name, page["latency_buckets"]),
        "breakers": {"load": tier["load_breaker"], "store": tier["store_breaker"]},
        "sheds": tier["sheds"],
    }


def _known(spans: dict[str, _Span]) -> Iterator[tuple[str, _Span]]:
    """Windows; one with a single reading stands for nothing yet."""
    for window, span in spans.items():
        empty = span.before is None and window != "start"
        yield window, _Span(0.0, span.now, span.now) if empty else span


def _share(part: float, rest: float) -> float | None:
    return part / (part + rest) if part + rest > 0 else None


def _latency(span: _Span, name: str, bounds: Sequence[float]) -> dict[str, float | None]:
    before, now = span.tier(name)
    counts = _counts(now)
    if before is not None:
        counts = [new - old for new, old in zip(counts, _counts(before), strict=True)]
    return {"p50": quantile(counts, bounds, 0.5), "p99": quantile(counts, bounds, 0.99)}


def _counts(tier: TierStats) -> list[int]:
    latency: Latency = tier["load_latency"]
    return latency["counts"]


_PRIMARY_REASONS = {
    "promotions_refused": "no room to promote",
    "stores_refused": "no room to store (calls)",
    "not_admitted": "offered too rarely",
}
_TIER_REASONS = {
    "sheds": "shed: too slow",
    "refused": "not stored: breaker open",
    "loads_overdue": "loads overdue (jobs)",
    "stores_overdue": "stores overdue (jobs)",
    "lookups_overdue": "look-ups overdue",
}
_FAILURES = {"load_failures": "load failed", "store_failures": "store failed"}


def _misses(span: _Span, names: Sequence[str]) -> list[MissReason]:
    """What kept chunks from being hits. What the last tier evicts is nowhere any more."""
    reasons = [*_reasons("primary", span.primary(), _PRIMARY_REASONS)]
    for name in names:
        figures = span.tier(name)
        reasons += _reasons(name, figures, _TIER_REASONS)
        for group, text in _FAILURES.items():
            before, now = figures
            causes = {cause: f"{text}: {cause}" for cause in now[group]}
            reasons += _reasons(name, (before and before[group], now[group]), causes)
    last = names[-1] if names else "primary"
    figures = span.tier(last) if names else span.primary()
    reasons += _reasons(last, figures, {"evictions": "evicted"})
    reasons.sort(key=lambda reason: (-reason["last_60s"], -reason["since_start"]))
    return reasons[:_MOST_REASONS]


def _reasons(tier: str, figures: tuple[Any, Any], texts: dict[str, str]) -> Iterator[MissReason]:
    before, now = figures
    for figure, text in texts.items():
        if count := now.get(figure, 0):
            more = 0 if before is None else int(_more(figures, figure))
            yield {"tier": tier, "reason": text, "last_60s": more, "since_start": count}


def _command(pid: int) -> str:
    """The command line of a process; empty when it is gone, or in another namespace."""
    try:
        raw = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return ""
    return " ".join(raw.decode(errors="replace").split("\0")).strip()
