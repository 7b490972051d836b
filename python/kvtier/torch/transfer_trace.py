"""Tells a trace of the transfers of an engine (`docs/operations.md`), where there is one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Self

from kvtier._kvtier import TraceFile
from kvtier.torch.ordering import Lane

if TYPE_CHECKING:
    from kvtier.torch.transfers import TransferJob

__all__ = ["TransferTrace"]

# Threads have the other tracks; Linux gives them smaller numbers.
_FIRST_TRACK = 1 << 24


class TransferTrace:
    """Has a track for each lane, on which copies do not overlap."""

    def __init__(self, file: TraceFile) -> None:
        """Names the lanes in `file`."""
        self._file = file
        first = _FIRST_TRACK + file.number * len(Lane)
        self._tracks = {lane: first + place for place, lane in enumerate(Lane)}
        for lane, track in self._tracks.items():
            file.name_track(track, f"transfers: {lane.name.lower()}")

    @classmethod
    def open(cls) -> Self | None:
        """None if no trace is wanted."""
        file = TraceFile.open()
        return None if file is None else cls(file)

    def ended(self, jobs: Sequence[TransferJob]) -> None:
        """Takes jobs that have ended, in the order they were submitted in."""
        for job in jobs:
            if job.error is None:
                self._file.span(
                    self._tracks[job.lane],
                    job.lane.name.lower(),
                    job.began,
                    job.seconds,
                    job=job.number,
                    bytes=job.bytes,
                )
        self._file.flush()
