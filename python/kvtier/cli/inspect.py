"""`kvtier inspect`: tells whose data is in a store, and how full, old and used it is."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from kvtier.cli.sizes import format_size
from kvtier.store import Distribution, Inspection

__all__ = ["add_parser", "run"]

_BAR_WIDTH = 40


def add_parser(subparsers: argparse._SubParsersAction[Any]) -> None:
    """Adds the command and its flags."""
    parser = subparsers.add_parser(
        "inspect",
        help="whose data is in a file tier's directory, and how full, old and used it is",
        description="Reads the identity, the headers and the order of accesses of a file tier's "
        "directory, open or not, and no payload (kvtier verify does).",
    )
    parser.add_argument("directory", type=Path, metavar="DIR", help="path of the file tier")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Prints what is there. Raises `KvTierError` or `OSError` when it could not run."""
    from kvtier import store

    found = store.inspect(arguments.directory)
    if arguments.json:
        print(json.dumps(found))
    else:
        for line in _lines(found, arguments.directory):
            print(line)
    return 0


def _lines(found: Inspection, directory: Path) -> Iterator[str]:
    owner = "nobody has it open" if found["owner"] is None else f"open in {found['owner']}"
    yield f"{directory}: format {found['format']}, {owner}"
    yield f"namespace: {json.dumps(found['namespace'], sort_keys=True)}"
    yield f"chunks of {format_size(found['chunk_bytes'])}, keys of {found['key_bytes']} bytes"
    yield (
        f"{found['chunks']:,} chunks of {found['slots']:,} that fit: "
        f"{format_size(found['used_bytes'])}, {format_size(found['allocated_bytes'])} allocated of "
        f"{format_size(found['capacity_bytes'])}"
    )
    if found["damaged_headers"] or found["damaged_pages"]:
        yield (
            f"damaged: {found['damaged_headers']} headers, {found['damaged_pages']} pages; "
            f"kvtier verify {directory} says which"
        )
    if found["oldest"] is not None and found["newest"] is not None:
        yield f"oldest written {_when(found['oldest'])}, newest {_when(found['newest'])}"
        yield from _histogram("age", found["ages_s"], _duration)
        yield from _histogram("loads", found["hits"], str)


def _when(seconds: int) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def _duration(seconds: int) -> str:
    for unit, length in (("d", 86_400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds // length} {unit}"
    return f"{seconds} s"


def _histogram(name: str, counted: Distribution, show: Callable[[int], str]) -> Iterator[str]:
    labels = [f"<= {show(bound)}" for bound in counted["bounds"]]
    labels.append(f"> {show(counted['bounds'][-1])}")
    most = max(counted["counts"])
    yield f"{name}:"
    for label, count in zip(labels, counted["counts"], strict=True):
        if count:
            yield f"  {label:>8} {count:>10,} {'#' * max(1, _BAR_WIDTH * count // most)}"
