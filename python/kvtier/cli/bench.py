"""`kvtier bench QUESTION`: figures of this machine, each beside a reference and a target.

A question is a module of `kvtier.bench` and an entry of `_QUESTIONS`: its summary and flags.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

from kvtier.cli.interrupts import heavy_import
from kvtier.cli.sizes import parse_size
from kvtier.errors import ConfigError

if TYPE_CHECKING:
    from kvtier.bench import Figure

__all__ = ["add_parser", "run"]

EXIT_UNTAKEN = 1


def _transfer_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="of the tensors")
    parser.add_argument(
        "--size", type=parse_size, default="256MiB", metavar="SIZE", help="of one transfer"
    )


def _file_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--directory", metavar="DIR", help="on the disk to measure")
    parser.add_argument(
        "--size", type=parse_size, default="512MiB", metavar="SIZE", help="of one round"
    )
    parser.add_argument(
        "--chunks", type=int, default=1_000_000, metavar="N", help="of the store to reopen"
    )


def _object_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--directory", metavar="DIR", help="for the server's objects")
    parser.add_argument(
        "--size", type=parse_size, default="128MiB", metavar="SIZE", help="of one round"
    )


def _network_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--redis", metavar="HOST:PORT", help="of a server that may be emptied; else one is started"
    )
    parser.add_argument(
        "--size", type=parse_size, default="128MiB", metavar="SIZE", help="of one round"
    )


_QUESTIONS: dict[str, tuple[str, Callable[[argparse.ArgumentParser], None]]] = {
    "transfer": ("KV cache to slots and back, beside plain copies of the size", _transfer_flags),
    "file": ("the file tier, beside fio and vLLM's on the same directory", _file_flags),
    "object": ("the object tier, beside boto3 on the same S3 server", _object_flags),
    "network": ("the redis tier, beside a plain socket and redis-py", _network_flags),
}


def add_parser(subparsers: argparse._SubParsersAction[Any]) -> None:
    """Adds the command, with one subcommand a question."""
    parser = subparsers.add_parser(
        "bench",
        help="figures of this machine, each beside a reference and a target",
        description="Measures a part of kvtier beside the fastest plain way to do the same, "
        "turn by turn in one run. Exit code 1 says that a figure could not be taken.",
    )
    questions = parser.add_subparsers(dest="question", metavar="QUESTION", required=True)
    for name, (summary, add_flags) in _QUESTIONS.items():
        question = questions.add_parser(
            name,
            help=summary,
            description=f"{summary}.",
            formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        )
        add_flags(question)
        question.add_argument("--rounds", type=int, default=15, metavar="N", help="of each figure")
        question.add_argument("--json", action="store_true", help="print one JSON object")
        question.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Takes the figures of one question and prints them; 1 when one could not be taken.

    Raises `KvTierError` or `OSError` when it could not run.
    """
    if arguments.rounds < 1:
        raise ConfigError(f"--rounds {arguments.rounds}: a figure needs one round or more")
    measure = heavy_import(f"kvtier.bench.{arguments.question}").measure
    flags = vars(arguments).keys() - {"command", "question", "run", "json"}
    taken = measure(**{name: getattr(arguments, name) for name in flags})
    figures = list(_announced(taken))

    from kvtier.bench.surroundings import machine, versions

    if arguments.json:
        records = [figure.as_json() for figure in figures]
        print(json.dumps({"machine": machine(), "versions": versions(), "figures": records}))
    else:
        from kvtier.cli.bench_report import print_report

        print_report(machine(), versions(), figures)
    missing = [figure for figure in figures if figure.value is None]
    for figure in missing:
        print(f"kvtier bench: {figure.name} not taken: {figure.why_untaken}", file=sys.stderr)
    return EXIT_UNTAKEN if missing else 0


def _announced(figures: Iterable[Figure]) -> Iterator[Figure]:
    """Passes figures on; on a terminal, standard error names the last one taken."""
    shown = sys.stderr.isatty()
    for figure in figures:
        if shown:
            print(f"\r\x1b[K{figure.name}", end="", file=sys.stderr, flush=True)
        yield figure
    if shown:
        print("\r\x1b[K", end="", file=sys.stderr, flush=True)
