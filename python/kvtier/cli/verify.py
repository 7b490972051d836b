"""`kvtier verify`: tells whether chunks in a store, server or bucket are what was stored."""

from __future__ import annotations

import argparse
import json
from typing import Any

from kvtier.errors import ConfigError
from kvtier.store import Finding, Verification

__all__ = ["add_parser", "run"]

EXIT_FOUND = 1
_BUCKET_SAMPLE = 1000


def add_parser(subparsers: argparse._SubParsersAction[Any]) -> None:
    """Adds the command and its flags."""
    parser = subparsers.add_parser(
        "verify",
        help="read the chunks of a file tier's directory, a server or a bucket, and compare each "
        "with its checksum",
        description="Checks every header, payload and page of a file tier's directory that no "
        "process has open; or every chunk on a Redis server or cluster, or a sample of those in a "
        "bucket, which may be in use. Exit code 0: all is good; 1: something is not, or was not "
        "and is repaired; 2: it could not be checked.",
    )
    parser.add_argument(
        "place",
        metavar="DIR|URL",
        help="path of the file tier; redis://host[:port]; or s3://BUCKET/PREFIX, gs, az, file",
    )
    parser.add_argument(
        "--repair", action="store_true", help="drop what is bad: it is a miss from now on"
    )
    parser.add_argument(
        "--sample",
        type=int,
        metavar="N",
        help="of a server, read N chunks and no more; of a bucket, 1000 if not given",
    )
    parser.add_argument(
        "--seed", type=int, default=0, metavar="N", help="of a bucket, which ones (0)"
    )
    parser.add_argument(
        "--endpoint", metavar="URL", help="of a bucket, another server than Amazon's"
    )
    parser.add_argument("--region", metavar="NAME", help="of a bucket")
    parser.add_argument("--allow-http", action="store_true", help="of a bucket, without encryption")
    parser.add_argument("--prefix", default="kvtier", help="of a server, the tier's `prefix`")
    parser.add_argument(
        "--tls-ca", metavar="FILE", help="of a server, the certificates to trust (PEM)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Checks and prints; returns 1 if something was found.

    Raises `KvTierError` or `OSError` when it could not run.
    """
    scheme, on_server, _ = arguments.place.partition("://")
    if not on_server:
        found = _check_directory(arguments)
    elif scheme in ("redis", "rediss"):
        found = _check_server(arguments)
    else:
        found = _check_bucket(arguments)
    # What is in front of the host in a URL may be a password.
    shown = arguments.place.rpartition("@")[2] if on_server else arguments.place
    if arguments.json:
        print(json.dumps(_record(found)))
    else:
        _print(found, shown)
    return 0 if found.good else EXIT_FOUND


def _check_directory(arguments: argparse.Namespace) -> Verification:
    from kvtier import store
    from kvtier.cli.progress import progress_bar

    if arguments.sample is not None:
        raise ConfigError("--sample is for servers: a directory is checked as a whole")
    with progress_bar(store.inspect(arguments.place)["chunks"], "checking chunks") as advance:
        return store.verify(
            arguments.place,
            repair=arguments.repair,
            progress=lambda _total, done: advance(None, done),
        )


def _check_server(arguments: argparse.Namespace) -> Verification:
    from kvtier import store
    from kvtier.cli.progress import progress_bar

    settings = {"url": arguments.place, "prefix": arguments.prefix}
    if arguments.tls_ca is not None:
        settings["tls_ca"] = arguments.tls_ca
    # How many of a server's values are chunks of this prefix is known at the end.
    with progress_bar(arguments.sample, "checking chunks") as advance:
        return store.verify_redis(
            settings,
            sample=arguments.sample,
            repair=arguments.repair,
            progress=lambda done: advance(None, done),
        )


def _check_bucket(arguments: argparse.Namespace) -> Verification:
    from kvtier import store
    from kvtier.cli.progress import progress_bar

    sample = _BUCKET_SAMPLE if arguments.sample is None else arguments.sample
    given = {"endpoint": arguments.endpoint, "region": arguments.region}
    settings = {name: value for name, value in given.items() if value is not None}
    settings |= {"url": arguments.place, "allow_http": arguments.allow_http}
    with progress_bar(sample, "checking chunks") as advance:
        return store.verify_objects(
            settings,
            sample=sample,
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


def _print(found: Verification, place: str) -> None:
    for finding in (*found.files, *found.corrupt):
        whose = "" if finding.key is None else f", chunk {finding.key.hex()}"
        dropped = ", dropped" if finding.repaired else ""
        print(f"{finding.place}: bad {finding.what}{whose}{dropped}")
    good = found.chunks - len(found.corrupt)
    print(f"{place}: {good} of {found.chunks} chunks are good")
    if not found.good and not found.repaired:
        print("a tier serves none of the bad ones; --repair drops them now")
