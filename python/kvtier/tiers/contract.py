"""What a tier written in Python has to do, and what it is given.

kvtier calls every method of a tier on one thread of the tier's own, never two at a time. So a
method may take its time: the engine does not wait for it, but loads that come meanwhile do. A
method that does not come back within the tier's `load_deadline_s` counts as a fault.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, Literal, NamedTuple

if TYPE_CHECKING:
    from kvtier._kvtier import TierJob

__all__ = ["JobResult", "SecondaryTier", "TierContext", "TierUsage", "overridden"]


@dataclass(frozen=True)
class TierContext:
    """What a tier is made for."""

    name: str
    """Its name in figures, events and log lines."""
    chunk_bytes: int
    """Bytes of every chunk."""
    key_bytes: int
    """Bytes of every key."""
    namespace: str
    """Whose data it is. What was stored under another namespace must not be given out."""
    region: memoryview = field(repr=False)
    """The primary tier, read-only: for libraries that want to be told their memory beforehand. What
    may be read or written, and when, is said by jobs alone."""
    notify: Callable[[], None] = field(repr=False)
    """Asks kvtier to call `finished` and `take_removed` soon; from any thread, at any time."""


class TierUsage(NamedTuple):
    """How full a tier is."""

    capacity_bytes: int = 0
    """Bytes it may take; 0 if it knows no bound."""
    used_bytes: int = 0
    chunks: int = 0


@dataclass(frozen=True)
class JobResult:
    """What became of a job. A key that is in neither `done` nor `failed` counts as lost."""

    job: int
    """`TierJob.id`."""
    done: Collection[bytes] | Mapping[bytes, int] = ()
    """The keys that were stored, or of a load, with each key the checksum it was stored with."""
    failed: Mapping[bytes, str] = field(default_factory=dict)
    """The keys that were not moved, and why: "io", "corrupt", "missing", "full" or "lost"."""
    evicted: Collection[bytes] = ()
    """The keys that had to go for it."""
    seconds: float | None = None
    """How long the work took; None: since the job was submitted."""


class SecondaryTier(ABC):
    """A tier behind the primary one.

    The parameters of `__init__` behind the context are the tier's own fields of its dict. Every
    method but the four abstract ones may be left out.
    """

    medium: ClassVar[Literal["memory", "file", "network"]] = "network"
    locality: ClassVar[Literal["local", "remote"]] = "local"

    def __init__(self, context: TierContext) -> None:
        """Opens the tier, on its thread. What it raises, `Manager(...)` raises."""
        self.context = context

    @abstractmethod
    def lookup(self, keys: Sequence[bytes]) -> Sequence[int]:
        """Gives HIT, MISS or RETRY for each key. RETRY: not known yet, ask again."""

    @abstractmethod
    def submit_store(self, job: TierJob) -> None:
        """Takes the chunks of a job, now or on threads of the tier's own."""

    @abstractmethod
    def submit_load(self, job: TierJob) -> None:
        """Brings the chunks of a job, now or on threads of the tier's own."""

    @abstractmethod
    def finished(self) -> Iterable[JobResult]:
        """Gives the results that came since the last call, each once."""

    def touch(self, keys: Sequence[bytes]) -> None:
        """Marks keys as used, the first one most recently; some may be unknown here."""

    def discard(self, keys: Sequence[bytes]) -> None:
        """Removes copies that turned out damaged."""

    def finish_request(self, request: int) -> None:
        """Tells that a request has ended: no job of it comes any more."""

    def take_removed(self) -> Iterable[bytes]:
        """Gives the keys that the tier removed by itself since the last call."""
        return ()

    def usage(self) -> TierUsage:
        """Tells how full the tier is; asked when results have come."""
        return TierUsage()

    def shutdown(self) -> None:
        """Ends what runs and closes the medium; the last call."""


def overridden(tier: type[SecondaryTier]) -> list[str]:
    """Gives the optional methods that a tier has: the others are not called."""
    optional = ("touch", "discard", "finish_request")
    return [name for name in optional if getattr(tier, name) is not getattr(SecondaryTier, name)]
