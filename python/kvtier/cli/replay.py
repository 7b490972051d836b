"""`kvtier replay`: what other policies and sizes would have hit on a trace."""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from decimal import Decimal, DecimalException
from pathlib import Path
from typing import Any

from kvtier.cli.interrupts import heavy_import
from kvtier.cli.sizes import parse_size
from kvtier.errors import ConfigError
from kvtier.replay import MAX_CAPACITY, OPTIMUM, POLICIES, Curves, Point, Target

__all__ = ["add_parser", "run"]

EXIT_UNREACHABLE = 1

_STANDARD_OUTPUT = "-"
_DEFAULT_CAPACITIES = "1k,5k,10k,30k,50k,100k"
_COUNT_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9}


def add_parser(subparsers: argparse._SubParsersAction[Any]) -> None:
    """Adds the command and its flags."""
    parser = subparsers.add_parser(
        "replay",
        help="what other policies and sizes would have hit on a trace",
        description="Drives the index that serves requests with a trace in the Mooncake format, "
        "one JSON object with hash_ids a line. Prints block hits and usable prefix hits (those "
        "before the first miss of their request), beside Belady's optimum, which knows the "
        "future. Exit code 1 says that --target can not be reached.",
    )
    parser.add_argument("traces", type=Path, nargs="+", metavar="TRACE", help="file of a trace")
    parser.add_argument(
        "--capacity",
        default=_DEFAULT_CAPACITIES,
        metavar="N,...",
        help="blocks, as 5k or 2.5M, or with --block-bytes sizes, as 64GiB; default %(default)s",
    )
    parser.add_argument(
        "--policy",
        default=",".join(POLICIES),
        metavar="NAME,...",
        help="default %(default)s",
    )
    parser.add_argument(
        "--target",
        type=float,
        metavar="RATE",
        help="say how much memory each policy needs for this rate of prefix hits, as 0.3",
    )
    units = parser.add_argument_group("what a block is")
    units.add_argument(
        "--block-tokens", type=int, default=512, metavar="N", help="tokens; default %(default)s"
    )
    units.add_argument("--block-bytes", type=parse_size, metavar="SIZE", help="memory, as 64MiB")
    output = parser.add_argument_group("output")
    output.add_argument("--json", action="store_true", help="print one JSON object")
    output.add_argument("--csv", metavar="FILE", help="write the results here; - prints them")
    output.add_argument("--plot", type=Path, metavar="FILE", help="draw hits over capacity (.png)")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Replays and prints; returns 1 if a policy can not reach the target.

    Raises `KvTierError` or `OSError` when it could not run.
    """
    policies = _policies(arguments.policy)
    capacities = _capacities(arguments.capacity, arguments.block_bytes)
    _check(arguments)
    # What is not there is said before the replays, not after.
    plot = _plotter(arguments.plot)
    names = _names(arguments.traces)
    from kvtier.cli import replay_report
    from kvtier.cli.progress import progress_bar

    units = replay_report.Units(arguments.block_tokens, arguments.block_bytes)
    traces: list[Curves] = []
    points: list[Point] = []
    targets: list[Target] = []
    wanted = [] if arguments.target is None else [*policies, OPTIMUM]
    each = len(policies) * len(capacities) + len(wanted)
    with progress_bar(each * len(names)) as advance:
        for path, name in names.items():
            advance(f"reading {name}", 0)
            curves = Curves.read(path, name)
            traces.append(curves)
            for policy in policies:
                for capacity in capacities:
                    advance(f"{name}: {policy} with {capacity:,} blocks", 0)
                    points.append(curves.point(policy, capacity))
                    advance(None, 1)
            for policy in wanted:
                advance(f"{name}: {policy}, bisection", 0)
                targets.append(curves.target(policy, arguments.target))
                advance(None, 1)
    if plot is not None:
        unlimited = {curves.name: curves.unlimited_hits() for curves in traces}
        plot(arguments.plot, points, unlimited, units)
    if arguments.csv == _STANDARD_OUTPUT:
        replay_report.write_csv(sys.stdout, points, units)
    elif arguments.csv is not None:
        with Path(arguments.csv).open("w", newline="") as file:
            replay_report.write_csv(file, points, units)
    if arguments.json:
        replay_report.print_json(points, targets, units, with_targets=bool(wanted))
    elif arguments.csv != _STANDARD_OUTPUT:
        replay_report.print_tables(traces, points, targets, units)
    missed = any(each.capacity is None and each.policy != OPTIMUM for each in targets)
    return EXIT_UNREACHABLE if missed else 0


def _check(arguments: argparse.Namespace) -> None:
    if arguments.block_tokens < 1:
        raise ConfigError(f"--block-tokens {arguments.block_tokens}: a block has 1 token or more")
    if arguments.target is not None and not 0 < arguments.target <= 1:
        raise ConfigError(f"--target {arguments.target:g} is no hit rate: use one from 0 to 1")
    if arguments.json and arguments.csv == _STANDARD_OUTPUT:
        raise ConfigError("--json and --csv - both want standard output: give --csv a file")
    for flag, value in (("--csv", arguments.csv), ("--plot", arguments.plot)):
        if value is None or value == _STANDARD_OUTPUT:
            continue
        if not Path(value).absolute().parent.is_dir():
            raise ConfigError(f"{flag} {value}: the directory does not exist")
        if Path(value).is_dir():
            raise ConfigError(f"{flag} {value} is a directory: name a file")


def _policies(text: str) -> list[str]:
    names = list(dict.fromkeys(name.strip() for name in text.split(",")))
    for name in names:
        if name not in POLICIES:
            raise ConfigError(f"--policy: unknown policy {name!r}: use {', '.join(POLICIES)}")
    return names


def _capacities(text: str, block_bytes: int | None) -> list[int]:
    return sorted({_capacity(part.strip(), block_bytes) for part in text.split(",")})


def _capacity(text: str, block_bytes: int | None) -> int:
    """Blocks of `5k`, `2.5M` or, with the size of a block, `64GiB`."""
    if text[-1:] in ("b", "B"):
        try:
            size = parse_size(text)
        except argparse.ArgumentTypeError as error:
            raise ConfigError(f"--capacity: {error}") from None
        if block_bytes is None:
            raise ConfigError(
                f"--capacity {text} is a size: give that of a block with --block-bytes"
            )
        blocks = size // block_bytes
        if blocks == 0:
            raise ConfigError(f"--capacity {text} is less than one block of {block_bytes} bytes")
    else:
        number, unit = (text[:-1], text[-1].lower()) if text[-1:].isalpha() else (text, "")
        try:
            exact = Decimal(number) * _COUNT_UNITS[unit]
            possible = 0 < exact <= MAX_CAPACITY
        except (DecimalException, KeyError):
            raise ConfigError(
                f"--capacity: {text!r} is no number of blocks; write 5000, 5k or 2.5M"
            ) from None
        # A whole number is made of a small one only: 1e999999 has too many digits.
        blocks = int(exact) if possible else 0
        if possible and blocks != exact:
            raise ConfigError(f"--capacity: {text} is no whole number of blocks")
    if not 1 <= blocks <= MAX_CAPACITY:
        raise ConfigError(f"--capacity: {text} is not possible: use 1 to {MAX_CAPACITY} blocks")
    return blocks


def _names(paths: list[Path]) -> dict[Path, str]:
    """What to call each trace: its file's name, with its directories where that is not enough."""
    unique = list(dict.fromkeys(paths))
    stems = Counter(path.stem for path in unique)
    return {path: path.stem if stems[path.stem] == 1 else str(path) for path in unique}


def _plotter(path: Path | None) -> Any:
    if path is None:
        return None
    try:
        module = heavy_import("kvtier.cli.replay_plot")
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "matplotlib":
            raise
        raise ConfigError("--plot needs matplotlib: pip install 'kvtier[plot]'") from None
    module.check_format(path)
    return module.draw
