"""Media, localities, sources of hits and events: vLLM's words for kvtier's.

vLLM knows the media CPU and STORAGE; a memory tier is CPU, files and network stores are STORAGE.
Changes of the primary tier have no owner, those of a tier have its name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from vllm.v1.kv_offload.base import Locality, Medium, OffloadingEvent, TierFilter
from vllm.v1.metrics.cache_hit_source import CacheHitSource

__all__ = ["LOCALITIES", "MEDIA", "SOURCES", "offloading_events", "tier_matchers"]

MEDIA = {"memory": Medium.CPU, "file": Medium.STORAGE, "network": Medium.STORAGE}
LOCALITIES = {"local": Locality.LOCAL, "remote": Locality.REMOTE}
SOURCES = {
    "memory": CacheHitSource.HOST,
    "file": CacheHitSource.DISK,
    "network": CacheHitSource.EXTERNAL_UNSPECIFIED,
}


def tier_matchers(tier_filter: TierFilter) -> list[dict[str, str]]:
    """A request's tier filter, as `Manager.begin_request` takes it."""
    localities = {theirs: ours for ours, theirs in LOCALITIES.items()}
    matchers: list[dict[str, str]] = []
    for matcher in tier_filter.matchers:
        where = {} if matcher.locality is None else {"locality": localities[matcher.locality]}
        if matcher.medium is None:
            matchers.append(where)
        else:
            media = (ours for ours, theirs in MEDIA.items() if theirs is matcher.medium)
            matchers.extend({"medium": medium, **where} for medium in media)
    return matchers


def offloading_events(
    events: Sequence[tuple[str, str, list[bytes]]], stats: Callable[[], dict[str, Any]]
) -> Iterator[OffloadingEvent]:
    """Events of `Manager.take_events`; those of breakers have no word in vLLM."""
    tiers = stats()["tiers"] if events else {}
    for kind, tier, keys in events:
        if kind not in ("stored", "removed"):
            continue
        if tier == "primary":
            yield OffloadingEvent(keys=keys, medium=Medium.CPU, removed=kind == "removed")
        else:
            yield OffloadingEvent(
                keys=keys,
                medium=MEDIA[tiers[tier]["medium"]],
                removed=kind == "removed",
                locality=LOCALITIES[tiers[tier]["locality"]],
                ownership=tier,
            )
