"""The table that `kvtier bench` prints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from kvtier.bench import Figure
from kvtier.cli.sizes import format_size

__all__ = ["print_report"]

_PIPE_WIDTH = 120


def print_report(
    machine: Mapping[str, Any], versions: Mapping[str, str], figures: Sequence[Figure]
) -> None:
    """Prints machine, versions and one line a figure."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=_PIPE_WIDTH)
    console.print(
        f"{machine['cpu']}, {machine['cores']} cores, {format_size(machine['memory_bytes'])}, "
        f"load {machine['load']}; {machine['gpu'] or 'no GPU'}",
        highlight=False,
    )
    console.print(", ".join(f"{name} {value}" for name, value in versions.items()), highlight=False)
    table = Table("figure", "value", "min - max", "reference", "ratio", "target")
    for figure in figures:
        table.add_row(*_cells(figure))
    console.print(table)


def _cells(figure: Figure) -> tuple[str, ...]:
    if figure.value is None:
        return (figure.name, "not taken", "", "", "", "")
    sign = "<=" if figure.smaller_is_better else ">="
    mark = {True: " met", False: " missed", None: ""}[figure.met]
    return (
        figure.name,
        f"{figure.value:.4g} {figure.unit}",
        f"{figure.min:.4g} - {figure.max:.4g}",
        "" if figure.reference is None else f"{figure.reference} {figure.reference_value:.4g}",
        "" if figure.ratio is None else f"{figure.ratio:.3f}",
        "" if figure.target is None else f"{sign} {figure.target:.4g}{mark}",
    )
