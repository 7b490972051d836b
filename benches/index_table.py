"""The index's figures of a criterion run, per key, beside their references and targets.

Reads what `cargo bench` left in target/criterion, and what `make bench-rivals` left in
benches/rivals/target/criterion if it was run. Figures are medians; a ratio is taken between two
figures of one run. Exits with 1 when a figure is missing.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).parents[1]
CRITERION = ROOT / "target" / "criterion"
RIVALS = ROOT / "benches" / "rivals" / "target" / "criterion"
BATCH = 128

SMALL, LARGE = "100 thousand entries", "10 million entries"
STORE = "store cycle with eviction"


@dataclass(frozen=True)
class Row:
    """One line: a figure in ns a key, what it is compared with, and what it should be."""

    what: str
    value: float
    reference: float | None
    target: str


def median(root: Path, group: str, name: str) -> float:
    """Nanoseconds a key. Raises `FileNotFoundError` when the benchmark was not run."""
    text = (root / group / name / "new" / "estimates.json").read_text()
    return float(json.loads(text)["median"]["point_estimate"]) / BATCH


def own_rows() -> list[Row]:
    bare = median(CRITERION, SMALL, "lookup, bare hashbrown")
    rows = [Row("lookup; bare hashbrown", median(CRITERION, SMALL, "lookup"), bare, "ratio <= 1.5")]
    for verb in ("lookup", "load cycle", STORE):
        small, large = (median(CRITERION, size, verb) for size in (SMALL, LARGE))
        rows.append(Row(f"{verb}, 10 million entries; 100 thousand", large, small, "ratio <= 3"))
    lru = median(CRITERION, STORE, "lru")
    for name in sorted(path.name for path in (CRITERION / STORE).iterdir() if path.is_dir()):
        if name not in ("report", "lru"):
            target = "<= 400 ns a chunk more" if name == "gittins" else ""
            rows.append(Row(f"{STORE}, {name}; lru", median(CRITERION, STORE, name), lru, target))
    return rows


def rival_rows() -> list[Row]:
    rows = []
    for group in ("touch", "insert"):
        figures = {
            path.name: median(RIVALS, group, path.name)
            for path in sorted((RIVALS / group).iterdir())
            if (path / "new").is_dir()
        }
        ours = figures.pop("kvtier")
        for name, figure in figures.items():
            # A bare table has no order to keep: it is there for scale.
            target = "ratio <= 1.3" if group == "touch" and "find only" not in name else ""
            rows.append(Row(f"{group}; {name}", ours, figure, target))
    return rows


def main() -> int:
    try:
        rows = own_rows() + (rival_rows() if RIVALS.is_dir() else [])
    except FileNotFoundError as missing:
        print(f"run `make bench` first: {missing}", file=sys.stderr)
        return 1
    table = Table("what; reference", "ns a key", "reference", "ratio", "target")
    for row in rows:
        reference = "" if row.reference is None else f"{row.reference:.1f}"
        ratio = "" if row.reference is None else f"{row.value / row.reference:.2f}"
        table.add_row(row.what, f"{row.value:.1f}", reference, ratio, row.target)
    Console(width=110).print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
