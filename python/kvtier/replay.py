"""What another policy or another size would have hit: curves over the replays of a trace.

`kvtier replay` prints what this module computes. A block is the unit of the trace (512 tokens in
Mooncake's); hit rates are shares of all block accesses.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvtier._kvtier import POLICIES, Trace
from kvtier.errors import ConfigError

__all__ = ["MAX_CAPACITY", "OPTIMUM", "POLICIES", "Curves", "Point", "Target", "Trace"]

MAX_CAPACITY = 2**31 - 1
"""The most blocks that an index takes."""

OPTIMUM = "optimum"
"""What Belady's optimum is called where a policy's name stands."""


@dataclass(frozen=True)
class Point:
    """One policy with one capacity, replayed. Hits are rates from 0 to 1."""

    trace: str
    policy: str
    capacity: int
    """In blocks."""
    requests: int
    blocks: int
    """Block accesses."""
    block_hits: float
    prefix_hits: float
    """Hits before the first miss of their request: only they save work."""
    optimum_hits: float
    """Block hits of Belady's optimum with this capacity."""
    seconds: float
    """How long the replay took."""


@dataclass(frozen=True)
class Target:
    """How much memory a policy needs for a rate of hits."""

    trace: str
    policy: str
    """A policy, or `OPTIMUM`: what no policy can do with less (block hits)."""
    target: float
    capacity: int | None
    """In blocks; None if no memory is enough."""
    hits: float | None
    """The rate at `capacity`: prefix hits, block hits of the optimum."""
    unlimited_hits: float
    """The rate with memory that evicts nothing."""


class Curves:
    """Replays of one trace, each run once and remembered.

    Raises `ConfigError` for a trace without requests.
    """

    def __init__(self, name: str, trace: Trace) -> None:
        self.name = name
        self.trace = trace
        if trace.blocks == 0:
            raise ConfigError(f"{name}: the trace has no requests with blocks")
        self.distinct = trace.distinct
        self._replays: dict[tuple[str, int], dict[str, Any]] = {}
        self._optima: dict[int, int] = {}

    @classmethod
    def read(cls, path: Path, name: str | None = None) -> Curves:
        """Of the trace in a file, named after it. Errors are those of `Trace.read`."""
        return cls(name or path.stem, Trace.read(path))

    def point(self, policy: str, capacity: int) -> Point:
        """Replays one policy with `capacity` blocks."""
        counts = self._replay(policy, capacity)
        blocks = self.trace.blocks
        return Point(
            trace=self.name,
            policy=policy,
            capacity=capacity,
            requests=self.trace.requests,
            blocks=blocks,
            block_hits=counts["block_hits"] / blocks,
            prefix_hits=counts["prefix_hits"] / blocks,
            optimum_hits=self._optimum(capacity) / blocks,
            seconds=counts["seconds"],
        )

    def points(self, policies: Sequence[str], capacities: Sequence[int]) -> Iterator[Point]:
        """Every policy with every capacity, policy by policy."""
        for policy in policies:
            for capacity in capacities:
                yield self.point(policy, capacity)

    def unlimited_hits(self) -> float:
        """Prefix hits of a memory that evicts nothing: no policy matters then, none has more."""
        return self._hits(POLICIES[0], self.distinct) / self.trace.blocks

    def target(self, policy: str, target: float) -> Target:
        """The least capacity whose prefix hits (`OPTIMUM`: block hits) reach `target`.

        Found by bisection between the capacities that were replayed before. Where more memory
        means fewer hits, which some policies do here and there, it is the least of its
        neighbourhood. Raises `ConfigError` for a target that is not above 0 and up to 1.
        """
        if not 0 < target <= 1:
            raise ConfigError(f"a target of {target:g} is no hit rate: use one above 0 and up to 1")
        blocks = self.trace.blocks
        unlimited = self._hits(policy, self.distinct) / blocks
        if unlimited < target:
            return Target(self.name, policy, target, None, None, unlimited)
        enough, too_few = self.distinct, 0
        for capacity in sorted(self._known(policy)):
            if capacity >= enough:
                break
            if self._hits(policy, capacity) / blocks >= target:
                enough = capacity
                break
            too_few = capacity
        while enough - too_few > 1:
            middle = (enough + too_few) // 2
            if self._hits(policy, middle) / blocks >= target:
                enough = middle
            else:
                too_few = middle
        hits = self._hits(policy, enough) / blocks
        return Target(self.name, policy, target, enough, hits, unlimited)

    def _known(self, policy: str) -> list[int]:
        if policy == OPTIMUM:
            return list(self._optima)
        return [capacity for name, capacity in self._replays if name == policy]

    def _hits(self, policy: str, capacity: int) -> int:
        if policy == OPTIMUM:
            return self._optimum(capacity)
        hits: int = self._replay(policy, capacity)["prefix_hits"]
        return hits

    def _replay(self, policy: str, capacity: int) -> dict[str, Any]:
        found = self._replays.get((policy, capacity))
        if found is None:
            found = self._replays[policy, capacity] = self.trace.replay(policy, capacity)
        return found

    def _optimum(self, capacity: int) -> int:
        found = self._optima.get(capacity)
        if found is None:
            found = self._optima[capacity] = self.trace.optimum(capacity)
        return found
