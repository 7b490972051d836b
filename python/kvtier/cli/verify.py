"""`kvtier verify`: tells whether every chunk of a store is what was stored."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from kvtier.store import Finding, Verification

__all__ = ["add_parser", "run"]

EXIT_FOUND = 1


def add_parser(subparsers: argparse._SubParsersAction[Any]) -> None:
    """Adds the command and its flags."""
    parser = subparsers.add_parser(
        "verify",
        help="read every chunk of a file tier's directory and compare it with its checksum",
        description="Checks every header, payload and page of a file tier's directory that no "
        "process has open. Exit code 0: all is good; 1: something is not, or was not and is "
        "repaired; 2: it could not be checked.",
    )
    parser.add_argument("directory", type=Path, metavar="DIR", help="path of the file tier")
    parser.add_argument(
        "--repair", action="store_true", help="drop what is bad: it is a miss from now on"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Checks and prints; returns 1 if something was found.

    Raises `KvTierError` or `OSError` when it could not run.
    """
    from kvtier import store
    from kvtier.cli.progress import progress_bar

    total = store.inspect(arguments.directory)["chunks"]
    with progress_bar(total, "checking chunks") as advance:
        found = store.verify(
            arguments.directory,
            repair=arguments.repair,
            progress=lambda _total, done: advance(None, done),
        )
    if arguments.json:
        print(json.dumps(_record(found)))
    else:
        _print(found, arguments.directory)
    return 0 if found.good else EXIT_FOUND


def _record(found: Verification) -> dict[str, Any]:
    return {
        "chunks": found.chunks,
        "ok": found.chunks - len(found.corrupt),
        "corrupt": [_finding(finding) for finding in found.corrupt],
        "files": [_finding(finding) for finding in found.files],
        "repaired": found.repaired,
    }


def _finding(finding: Finding) -> dict[str, Any]:
    key = None if finding.key is None else finding.key.hex()
    return {"key": key, "where": finding.place, "what": finding.what}


def _print(found: Verification, directory: Path) -> None:
    for finding in (*found.files, *found.corrupt):
        whose = "" if finding.key is None else f", chunk {finding.key.hex()}"
        dropped = ", dropped" if finding.repaired else ""
        print(f"{finding.place}: bad {finding.what}{whose}{dropped}")
    good = found.chunks - len(found.corrupt)
    print(f"{directory}: {good} of {found.chunks} chunks are good")
    if not found.good and not found.repaired:
        print("a tier serves none of the bad ones; --repair drops them now")
