"""`kvtier doctor [DIR]`: what slows or breaks kvtier on this machine, and what to do."""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import textwrap
from pathlib import Path
from typing import Any

from kvtier.cli.interrupts import heavy_import
from kvtier.cli.sizes import parse_size
from kvtier.errors import ConfigError

__all__ = ["add_parser", "run"]

EXIT_BAD = 1
_INDENT = " " * 21
_WIDTH = 100


def add_parser(subparsers: argparse._SubParsersAction[Any]) -> None:
    """Adds the command and its flags."""
    parser = subparsers.add_parser(
        "doctor",
        help="what slows or breaks kvtier on this machine, and what to do",
        description="Checks versions, limits, io_uring, the GPU and, if DIR is given, its disk. "
        "Exit code 1 says that something is bad: it fails, or will.",
    )
    parser.add_argument(
        "directory", type=Path, nargs="?", metavar="DIR", help="where a file tier is to be"
    )
    parser.add_argument("--host", type=parse_size, metavar="SIZE", help="of the primary tier")
    parser.add_argument("--disk", type=parse_size, metavar="SIZE", help="of the file tier")
    parser.add_argument(
        "--seconds",
        type=float,
        default=2.0,
        metavar="S",
        help="that the disk is probed; default %(default)s",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Prints a finding a check; 1 when one is bad.

    Raises `KvTierError` or `OSError` when it could not run.
    """
    _refuse(arguments)
    with contextlib.suppress(ImportError, OSError):  # that it can not be imported is a finding
        heavy_import("torch")
    from kvtier.bench.surroundings import machine, versions
    from kvtier.doctor import Plan, examine

    plan = Plan(arguments.directory, arguments.host, arguments.disk, arguments.seconds)
    records = []
    for name, finding in examine(plan):
        records.append({"name": name, **vars(finding)})
        if not arguments.json:
            _print(name, finding.status, finding.found, finding.advice)
    if arguments.json:
        report = {"machine": machine(), "versions": versions(), "findings": records}
        print(json.dumps(report))
    elif plan.directory is None:
        print("no disk was checked: kvtier doctor DIR does, for a file tier in DIR")
    return EXIT_BAD if any(record["status"] == "bad" for record in records) else 0


def _refuse(arguments: argparse.Namespace) -> None:
    directory = arguments.directory
    if directory is None:
        if arguments.disk is not None:
            raise ConfigError("--disk: of which directory? Give DIR")
        return
    if not directory.is_dir():
        raise ConfigError(f"{directory} is not a directory; make it, as the user of the engine")
    if not os.access(directory, os.R_OK | os.W_OK | os.X_OK):
        raise ConfigError(f"{directory}: no permission to write there; run as the engine's user")
    if not 0 <= arguments.seconds < math.inf:
        raise ConfigError(f"--seconds {arguments.seconds}: a probe takes 0 seconds or more")


def _print(name: str, status: str, found: str, advice: str | None) -> None:
    mark = {"ok": "ok  ", "warn": "warn", "bad": "BAD "}[status]
    print(textwrap.fill(f"{mark}  {name:<14} {found}", _WIDTH, subsequent_indent=_INDENT))
    if advice is not None:
        print(
            textwrap.fill(
                f"-> {advice}", _WIDTH, initial_indent=_INDENT, subsequent_indent=_INDENT + "   "
            )
        )
