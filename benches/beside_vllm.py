"""What the benchmarks beside vLLM share: its classes, keys, figures and how they are printed."""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import json
import os
import platform
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import kvtier

Batch = list[bytes]


@dataclass(frozen=True)
class Target:
    """What the design asks for."""

    ratio: float | None = None
    value: float | None = None


def keys_of(numbers: Sequence[int]) -> Batch:
    """Block hash and group index, as vLLM makes them; the same in every run."""
    return [hashlib.sha256(number.to_bytes(8, "little")).digest() + bytes(4) for number in numbers]


def import_vllm(modules: Mapping[str, str]) -> dict[str, Any] | None:
    """vLLM's modules by short names, with its `version`, or None with a line that says why.

    What vLLM prints goes to standard error.
    """
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    try:
        with contextlib.redirect_stdout(sys.stderr):
            found = {name: importlib.import_module(path) for name, path in modules.items()}
            version = importlib.import_module("vllm").__version__
    except ImportError as error:
        print(
            f"comparison skipped, vLLM can not be imported ({error}); `make bench-vllm` has it",
            file=sys.stderr,
        )
        return None
    return {**found, "version": version}


def record(
    name: str, unit: str, ours: list[float], theirs: list[float] | None, target: Target, rival: str
) -> dict[str, Any]:
    """One figure in the form of `kvtier bench`."""
    value = statistics.median(ours)
    reference = statistics.median(theirs) if theirs else None
    return {
        "name": name,
        "value": value,
        "unit": unit,
        "min": min(ours),
        "max": max(ours),
        "reference": rival if theirs else None,
        "reference_value": reference,
        "reference_min": min(theirs) if theirs else None,
        "reference_max": max(theirs) if theirs else None,
        "ratio": reference / value if reference else None,
        "target": target.value if target.ratio is None else target.ratio,
        "target_of": "value" if target.ratio is None else "ratio",
    }


def line(figure: dict[str, Any]) -> str:
    """A figure as a row of the table."""

    def number(value: float) -> str:
        return f"{value:.0f}" if value >= 100 else f"{value:.3g}"

    def span(middle: float | None, least: float | None, most: float | None) -> str:
        if middle is None or least is None or most is None:
            return "-"
        return f"{number(middle)} ({number(least)} to {number(most)})"

    ours = span(figure["value"], figure["min"], figure["max"])
    theirs = span(figure["reference_value"], figure["reference_min"], figure["reference_max"])
    ratio = "-" if figure["ratio"] is None else f"{figure['ratio']:.1f}x"
    target = figure["target"]
    if target is None:
        wanted = ""
    elif figure["target_of"] == "value":
        wanted = f"{number(target)} {figure['unit']} or less"
    else:
        wanted = f"{number(target)}x or more"
    return f"{figure['name']:<26} {ours:>26} {theirs:>28} {ratio:>8}  {wanted}"


def report(
    title: str, figures: list[dict[str, Any]], vllm: dict[str, Any] | None, *, as_json: bool
) -> None:
    """Prints the figures as a table, or as one JSON object."""
    versions = {
        "kvtier": kvtier.__version__,
        "python": platform.python_version(),
        "vllm": None if vllm is None else vllm["version"],
    }
    if as_json:
        machine = {"machine": platform.machine(), "cpus": os.cpu_count()}
        print(json.dumps({"machine": machine, "versions": versions, "figures": figures}))
        return
    print(", ".join(f"{name} {version}" for name, version in versions.items() if version))
    print(title)
    print(f"{'':<26} {'kvtier (min to max)':>26} {'vLLM (min to max)':>28} {'ratio':>8}  target")
    for figure in figures:
        print(line(figure))
