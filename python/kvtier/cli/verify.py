"""`kvtier verify`: tells whether the chunks of a store are what was stored."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from kvtier.errors import ConfigError
from kvtier.store import Finding, Verification

__all__ = ["add_parser", "run"]

EXIT_FOUND = 1


def add_parser(subparsers: argparse._SubParsersAction[Any]) -> None:
    """Adds the command and its flags."""
    parser = subparsers.add_parser(
        "verify",
        help="read the chunks of a file tier's directory, or of a bucket, and compare each with "
        "its checksum",
        description="Checks every header, payload and page of a file tier's directory that no "
        "process has open; or a sample of the chunks in a bucket, of every namespace. Exit code 0: "
        "all is good; 1: something is not, or was not and is repaired; 2: it could not be checked.",
    )
    parser.add_argument(
        "store",
        metavar="DIR|URL",
        help="path of the file tier; or s3://BUCKET/PREFIX, gs, az, file",
    )
    parser.add_argument(
        "--sample", type=int, default=1000, metavar="N", help="of a bucket, chunks to check (1000)"
    )
    parser.add_argument(
        "--seed", type=int, default=0, metavar="N", help="of a bucket, which ones (0)"
    )
    parser.add_argument(
        "--endpoint", metavar="URL", help="of a bucket, another server than Amazon's"
    )
    parser.add_argument("--region", metavar="NAME", help="of a bucket")
    parser.add_argument("--allow-http", action="store_true", help="of a bucket, without encryption")
    parser.add_argument(
        "--repair", action="store_true", help="drop what is bad: it is a miss from now on"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Checks and prints; returns 1 if something was found.

    Raises `KvTierError` or `OSError` when it could not run.
    """
    found = _check_bucket(arguments) if "://" in arguments.store else _check_directory(arguments)
    if arguments.json:
        print(json.dumps(_record(found)))
    else:
        _print(found, arguments.store)
    return 0 if found.good else EXIT_FOUND


def _check_directory(arguments: argparse.Namespace) -> Verification:
    from kvtier import store
    from kvtier.cli.progress import progress_bar

    directory = Path(arguments.store)
    total = store.inspect(directory)["chunks"]
    with progress_bar(total, "checking chunks") as advance:
        return store.verify(
            directory,
            repair=arguments.repair,
            progress=lambda _total, done: advance(None, done),
        )


def _check_bucket(arguments: argparse.Namespace) -> Verification:
    from kvtier import store
    from kvtier.cli.progress import progress_bar

    if arguments.sample < 1 or arguments.seed < 0:
        raise ConfigError(
            f"--sample {arguments.sample} must be at least 1, --seed {arguments.seed} at least 0"
        )
    given = {"endpoint": arguments.endpoint, "region": arguments.region}
    settings = {name: value for name, value in given.items() if value is not None}
    settings |= {"url": arguments.store, "allow_http": arguments.allow_http}
    with progress_bar(arguments.sample, "checking chunks") as advance:
        return store.verify_objects(
            settings,
            sample=arguments.sample,
            seed=arguments.seed,
            repair=arguments.repair,
            progress=lambda _total, done: advance(None, done),
        )


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


def _print(found: Verification, store: str) -> None:
    for finding in (*found.files, *found.corrupt):
        whose = "" if finding.key is None else f", chunk {finding.key.hex()}"
        dropped = ", dropped" if finding.repaired else ""
        print(f"{finding.place}: bad {finding.what}{whose}{dropped}")
    good = found.chunks - len(found.corrupt)
    print(f"{store}: {good} of {found.chunks} chunks are good")
    if not found.good and not found.repaired:
        print("a tier serves none of the bad ones; --repair drops them now")
