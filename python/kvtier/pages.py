"""Figures of managers in other processes, out of their stats pages.

Every `Manager` keeps a page of a few KiB in `/dev/shm`, readable by its user alone, and writes its
figures there at the end of each step. To read pages costs the engine nothing and needs nothing of
it; `kvtier top` and `kvtier exporter` do it. `KVTIER_STATS_DIR` names another directory, which
must be in memory (tmpfs), or, empty, turns the pages off; set it for the engine and for the reader.

Root reads the pages of all users. A page whose process is gone is removed by the next reader.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TypedDict, cast

from kvtier._kvtier import read_stats_pages, stats_directory
from kvtier.config import PrimaryStats, TierStats
from kvtier.errors import StatsPageError

__all__ = ["Pages", "Stats", "StatsPage", "read_pages", "stats_directory"]


class Stats(TypedDict):
    """What `Manager.stats()` returns."""

    primary: PrimaryStats
    tiers: dict[str, TierStats]


class StatsPage(TypedDict):
    """The page of one manager. Another version's may lack figures, or have more."""

    path: str
    uid: int
    pid: int  # in its own namespace
    manager: int  # of several managers of one process, which
    version: str  # of the kvtier that wrote it
    opened: int  # when the manager was made, in seconds since 1970
    published: float  # when its last step ended
    slot_bytes: int
    latency_buckets: list[float]  # upper ends in seconds; the last bucket has none
    directories: dict[str, str]  # where tiers keep their chunks, of those that do so in files
    stats: Stats


@dataclass(frozen=True)
class Pages:
    """What is in a directory of pages."""

    pages: list[StatsPage]  # by pid and manager
    refused: list[str]  # why pages of live processes could not be read


def read_pages(directory: str | os.PathLike[str] | None = None) -> Pages:
    """The pages of all processes; `directory` is what the environment says, if it is None.

    Raises `StatsPageError` when it can not be listed, or the environment turns pages off.
    """
    directory = stats_directory() if directory is None else directory
    if directory is None:
        raise StatsPageError("KVTIER_STATS_DIR is empty, so there are no stats pages: unset it")
    pages, refused = read_stats_pages(directory)
    return Pages(cast(list[StatsPage], pages), refused)
