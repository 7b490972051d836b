"""Writes docs/performance.md and its plots from reports of `kvtier bench QUESTION --json`.

    python benches/performance_page.py [--reports FOLDER] [--out FOLDER]

The reports are FOLDER/QUESTION.json, and are kept beside the page: whoever wants a figure of
their own version takes it from there. `make performance` takes them anew.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kvtier.cli.bench import QUESTIONS
from kvtier.cli.sizes import format_size

ROOT = Path(__file__).parents[1]
PLOTS = "performance"
INTRODUCTION = """\
# Performance

`make performance` takes these figures and writes this page; `kvtier bench QUESTION` takes them on a
machine of yours. A figure is the median of several rounds, with the least and the greatest beside
it. What it is compared with is measured in the same rounds, turn by turn, and the ratio is the
median of the rounds' ratios. What the tables call *NAME.vllm* is *NAME* beside vLLM, in the same
process and on the same keys.

The plots show how many times as fast as its reference kvtier is: to the right of 1 it is faster.
"""


def number(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def is_rate(figure: dict[str, Any]) -> bool:
    """Whether more is better; of times and counts, less is."""
    return str(figure["unit"]).endswith("/s")


def times_as_fast(figure: dict[str, Any]) -> float | None:
    ratio = figure["ratio"]
    if not ratio:
        return None
    return float(ratio if is_rate(figure) else 1 / ratio)


def target(figure: dict[str, Any]) -> str:
    wanted = figure["target"]
    reached = figure["value"] if figure["reference"] is None else figure["ratio"]
    if wanted is None or reached is None:
        return ""
    met = reached >= wanted if is_rate(figure) else reached <= wanted
    sign = "≥" if is_rate(figure) else "≤"
    return f"{sign} {number(wanted)}, {'met' if met else '**missed**'}"


def row(figure: dict[str, Any]) -> str:
    if figure["value"] is None:
        return f"| `{figure['name']}` | not taken | | | | |"
    reference = figure["reference"]
    cells = (
        f"`{figure['name']}`",
        f"{number(figure['value'])} {figure['unit']}",
        f"{number(figure['min'])} to {number(figure['max'])}",
        "" if reference is None else f"{reference}: {number(figure['reference_value'])}",
        "" if figure["ratio"] is None else f"{figure['ratio']:.3g}",
        target(figure),
    )
    return f"| {' | '.join(cells)} |"


def section(question: str, report: dict[str, Any]) -> Iterator[str]:
    """The lines of one question."""
    machine, versions = report["machine"], report["versions"]
    busy = " (busy with other work: only the ratios say much)"
    yield f"## {question}: {QUESTIONS[question].summary}"
    yield ""
    yield (
        f"{machine['cpu']}, {machine['cores']} cores, {format_size(machine['memory_bytes'])}, "
        f"{machine['gpu'] or 'no GPU'}, kernel {machine['kernel']}, load {machine['load']}"
        f"{busy if machine['load'] > machine['cores'] else ''}; "
        + ", ".join(f"{name} {version}" for name, version in versions.items())
    )
    yield ""
    if any(times_as_fast(figure) for figure in report["figures"]):
        yield f"![{question}, times as fast as its reference]({PLOTS}/{question}.svg)"
        yield ""
    yield "| figure | median | least to greatest | reference | ratio | target |"
    yield "|---|---|---|---|---|---|"
    yield from map(row, report["figures"])


def page(reports: dict[str, dict[str, Any]]) -> str:
    """The text of the page."""
    sections = ("\n".join(section(*item)) for item in reports.items())
    return "\n".join((INTRODUCTION, "\n\n".join(sections), ""))


def plot(figures: list[dict[str, Any]], path: Path) -> None:
    """Draws how many times as fast as their references figures are."""
    import matplotlib as mpl

    mpl.use("svg")
    mpl.rcParams["svg.hashsalt"] = "kvtier"  # the same figures make the same file
    import matplotlib.pyplot as plt

    drawn = [(figure["name"], times) for figure in figures if (times := times_as_fast(figure))]
    figure, axes = plt.subplots(figsize=(8, 0.9 + 0.32 * len(drawn)), layout="constrained")
    names, values = zip(*reversed(drawn), strict=True)
    axes.barh(names, [value - 1 for value in values], left=1, color="#4a6fa5")
    axes.axvline(1, color="black", linewidth=1)
    axes.set_xscale("log")
    axes.set_xlim(min(0.5, *values) / 1.2, max(2, *values) * 1.6)
    for name, value in zip(names, values, strict=True):
        axes.annotate(
            f"{value:.3g}",
            (max(value, 1), name),
            xytext=(4, 0),
            textcoords="offset points",
            va="center",
        )
    axes.set_xlabel("times as fast as its reference")
    figure.savefig(path, format="svg", metadata={"Date": None})
    plt.close(figure)


def read_reports(folder: Path) -> dict[str, dict[str, Any]]:
    """The reports that are there, in the order of the questions."""
    found = {question: folder / f"{question}.json" for question in QUESTIONS}
    return {
        question: json.loads(path.read_text()) for question, path in found.items() if path.is_file()
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--reports", type=Path, default=ROOT / "docs" / PLOTS, metavar="FOLDER")
    parser.add_argument("--out", type=Path, default=ROOT / "docs", metavar="FOLDER")
    arguments = parser.parse_args()
    reports = read_reports(arguments.reports)
    if not reports:
        print(f"{arguments.reports} has no report; `make performance` takes them", file=sys.stderr)
        return 2
    (arguments.out / PLOTS).mkdir(parents=True, exist_ok=True)
    for question, report in reports.items():
        if any(times_as_fast(figure) for figure in report["figures"]):
            plot(report["figures"], arguments.out / PLOTS / f"{question}.svg")
    (arguments.out / "performance.md").write_text(page(reports))
    return 0


if __name__ == "__main__":
    sys.exit(main())
