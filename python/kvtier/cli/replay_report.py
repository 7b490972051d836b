"""How `kvtier replay` shows its progress and its result."""

from __future__ import annotations

import csv
import dataclasses
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TextIO

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from kvtier.cli.sizes import format_size
from kvtier.replay import OPTIMUM, Curves, Point, Target

__all__ = ["Units", "print_json", "print_tables", "write_csv"]

GIB = 1 << 30

_PIPE_WIDTH = 110
_LABEL_WIDTH = 24
_COLUMN_WIDTH = 12


@dataclass(frozen=True)
class Units:
    """What a block of the trace is."""

    block_tokens: int
    block_bytes: int | None

    def tokens(self, blocks: int) -> int:
        """Tokens of so many blocks."""
        return blocks * self.block_tokens

    def bytes(self, blocks: int) -> int | None:
        """Bytes of so many blocks, if known."""
        return None if self.block_bytes is None else blocks * self.block_bytes

    def gib(self, blocks: int) -> float | None:
        """GiB of so many blocks, if known."""
        size = self.bytes(blocks)
        return None if size is None else size / GIB


def print_json(
    points: Sequence[Point], targets: Sequence[Target], units: Units, *, with_targets: bool
) -> None:
    """Prints one object on one line."""
    shown: dict[str, Any] = {"results": [dataclasses.asdict(point) for point in points]}
    if with_targets:
        shown["targets"] = [_target_record(target, units) for target in targets]
    print(json.dumps(shown))


def _target_record(target: Target, units: Units) -> dict[str, Any]:
    blocks = target.capacity
    return {
        **dataclasses.asdict(target),
        "reachable": blocks is not None,
        "tokens": None if blocks is None else units.tokens(blocks),
        "bytes": None if blocks is None else units.bytes(blocks),
    }


def write_csv(file: TextIO, points: Sequence[Point], units: Units) -> None:
    """Writes a header and a row a point: its fields, then the capacity in tokens and bytes."""
    fields = [field.name for field in dataclasses.fields(Point)]
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow([*fields, "capacity_tokens", "capacity_bytes"])
    for point in points:
        capacity = point.capacity
        more = [units.tokens(capacity), units.bytes(capacity)]
        writer.writerow([*dataclasses.astuple(point), *more])


def print_tables(
    traces: Sequence[Curves], points: Sequence[Point], targets: Sequence[Target], units: Units
) -> None:
    """Prints, for every trace, hits over capacity and what the target takes."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=_PIPE_WIDTH)
    columns = max(1, (console.width - _LABEL_WIDTH) // _COLUMN_WIDTH)
    for curves in traces:
        trace = curves.trace
        unlimited = curves.unlimited_hits()
        _say(
            console,
            f"{curves.name}: {trace.requests:,} requests, {trace.blocks:,} block accesses, "
            f"{curves.distinct:,} different blocks; unlimited memory has {unlimited:.2%} prefix "
            "hits",
        )
        own = [point for point in points if point.trace == curves.name]
        capacities = list(dict.fromkeys(point.capacity for point in own))
        for start in range(0, len(capacities), columns):
            console.print(_hit_table(own, capacities[start : start + columns], units))
        wanted = [target for target in targets if target.trace == curves.name]
        if wanted:
            console.print(_target_table(wanted, units))
            for line in _unreachable(wanted):
                _say(console, line)


def _say(console: Console, line: str) -> None:
    console.print(line, soft_wrap=True, markup=False)


def _table(*columns: str) -> Table:
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        left = column in ("policy", "hits")
        table.add_column(column, justify="left" if left else "right", no_wrap=True)
    return table


def _hit_table(points: Sequence[Point], capacities: Sequence[int], units: Units) -> Table:
    table = _table("policy", "hits", *(f"{capacity:,}" for capacity in capacities))
    at = {(point.policy, point.capacity): point for point in points}
    policies = dict.fromkeys(point.policy for point in points)
    best = {size: max(at[policy, size].prefix_hits for policy in policies) for size in capacities}
    for policy in policies:
        row = [at[policy, capacity] for capacity in capacities]
        prefix = [
            f"[bold]{point.prefix_hits:.2%}[/bold]"
            if point.prefix_hits == best[point.capacity]
            else f"{point.prefix_hits:.2%}"
            for point in row
        ]
        table.add_row(policy, "prefix", *prefix)
        table.add_row("", "block", *(f"{point.block_hits:.2%}" for point in row))
    ceiling = [next(point for point in points if point.capacity == size) for size in capacities]
    table.add_row(OPTIMUM, "block", *(f"{point.optimum_hits:.2%}" for point in ceiling))
    table.add_section()
    table.add_row("tokens", "", *(_short(units.tokens(capacity)) for capacity in capacities))
    if units.block_bytes is not None:
        sizes = [format_size(capacity * units.block_bytes) for capacity in capacities]
        table.add_row("memory", "", *sizes)
    return table


def _target_table(targets: Sequence[Target], units: Units) -> Table:
    sized = units.block_bytes is not None
    table = _table("policy", "hits", "target", "blocks", "tokens", *(["GiB"] if sized else []))
    for target in targets:
        kind = "block" if target.policy == OPTIMUM else "prefix"
        blocks = target.capacity
        if blocks is None:
            cells = ["unreachable", "-", *(["-"] if sized else [])]
        else:
            gib = units.gib(blocks)
            cells = [f"{blocks:,}", f"{units.tokens(blocks):,}"]
            cells += [] if gib is None else [f"{gib:,.2f}"]
        table.add_row(target.policy, kind, f"{target.target:.2%}", *cells)
    return table


def _unreachable(targets: Sequence[Target]) -> Iterator[str]:
    for target in targets:
        if target.capacity is None and target.policy != OPTIMUM:
            yield (
                f"{target.policy} can not reach {target.target:.2%}: even unlimited memory has "
                f"{target.unlimited_hits:.2%} prefix hits"
            )


def _short(number: int) -> str:
    for unit, name in ((10**9, "G"), (10**6, "M"), (10**3, "k")):
        if number >= unit:
            return f"{number / unit:.4g}{name}"
    return str(number)
