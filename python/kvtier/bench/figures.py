"""The record of one figure, and how figures are taken side by side."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

__all__ = ["Figure", "alternate", "compared", "untaken"]

Timed = Callable[[], float]
"""Does one round and returns its figure in the unit of the question."""


@dataclass(frozen=True)
class Figure:
    """One line of a report; `as_json` gives the record that `--json` prints."""

    name: str
    """Dotted, from the question to the variant: `transfer.store.64KiB.host`."""
    value: float | None
    """The median of the rounds; None when the figure could not be taken."""
    unit: str
    min: float | None = None
    max: float | None = None
    reference: str | None = None
    """What it is compared with."""
    reference_value: float | None = None
    """The median of the reference's rounds, in the same unit."""
    ratio: float | None = None
    """Figure over reference: the median of the rounds' ratios."""
    target: float | None = None
    """What `ratio` should reach, or `value` where there is no reference."""
    smaller_is_better: bool = False
    """Whether the target is a limit and not a goal. Not part of the record: the unit tells."""
    why_untaken: str | None = None
    """What kept the figure from being taken. Not part of the record."""

    @property
    def met(self) -> bool | None:
        """Whether the target is met; None without a target or a value."""
        reached = self.value if self.reference is None else self.ratio
        if self.target is None or reached is None:
            return None
        return reached <= self.target if self.smaller_is_better else reached >= self.target

    def as_json(self) -> dict[str, Any]:
        """The record: plain values, numbers rounded to four significant digits."""
        record = asdict(self)
        del record["smaller_is_better"], record["why_untaken"]
        return {
            name: float(f"{value:.4g}") if isinstance(value, float) else value
            for name, value in record.items()
        }


def alternate(rounds: int, *takes: Timed) -> list[list[float]]:
    """Runs all of `takes` in turn, `rounds` times after one round to warm up.

    Returns the figures of each in the order of the rounds: entry `i` of all lists belongs to
    one round, so that ratios can be taken between them.
    """
    for take in takes:
        take()
    results: list[list[float]] = [[] for _ in takes]
    for _ in range(rounds):
        for take, result in zip(takes, results, strict=True):
            result.append(take())
    return results


def compared(
    name: str,
    unit: str,
    ours: Sequence[float],
    *,
    reference: str | None = None,
    theirs: Sequence[float] | None = None,
    target: float | None = None,
    smaller_is_better: bool = False,
) -> Figure:
    """The figure of the rounds `ours`, beside the rounds `theirs` of `reference`."""
    ratio = None
    if theirs is not None:
        pairs = zip(ours, theirs, strict=True)
        ratio = statistics.median(our / their for our, their in pairs)
    return Figure(
        name=name,
        value=statistics.median(ours),
        unit=unit,
        min=min(ours),
        max=max(ours),
        reference=reference,
        reference_value=None if theirs is None else statistics.median(theirs),
        ratio=ratio,
        target=target,
        smaller_is_better=smaller_is_better,
    )


def untaken(name: str, unit: str, why: str) -> Figure:
    """A figure that could not be taken; `why` is one line for people."""
    return Figure(name=name, value=None, unit=unit, why_untaken=why)
