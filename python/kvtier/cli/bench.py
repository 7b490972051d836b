"""`kvtier bench QUESTION`: figures of this machine, each beside a reference and a target.

A question is a module of `kvtier.bench` and an entry of `QUESTIONS`: its summary and flags.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from kvtier.cli.interrupts import heavy_import
from kvtier.cli.sizes import parse_size
from kvtier.errors import ConfigError

if TYPE_CHECKING:
    from kvtier.bench import Figure

__all__ = ["QUESTIONS", "Question", "add_parser", "run"]

EXIT_UNTAKEN = 1


class Question(NamedTuple):
    """A question's line of help, its flags, and how many rounds a figure has by default."""

    summary: str
    add_flags: Callable[[argparse.ArgumentParser], None]
    rounds: int = 15


def _size_flag(parser: argparse.ArgumentParser, default: str, *, of: str = "one round") -> None:
    parser.add_argument("--size", type=parse_size, default=default, metavar="SIZE", help=f"of {of}")


def _index_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--keys", type=int, default=100_000, metavar="N", help="in the index")
    parser.add_argument(
        "--batches", type=int, default=100, metavar="N", help="of 128 keys, in a round"
    )


def _manager_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--keys", type=int, default=8_192, metavar="N", help="of a request")


def _scheduler_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--requests", type=int, default=64, metavar="N", help="at once")
    parser.add_argument("--tokens", type=int, default=32_768, metavar="N", help="of a request")


def _transfer_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="of the tensors")
    _size_flag(parser, "256MiB", of="one transfer")


def _file_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--directory", metavar="DIR", help="on the disk to measure")
    _size_flag(parser, "512MiB")
    parser.add_argument(
        "--chunks", type=int, default=1_000_000, metavar="N", help="of the store to reopen"
    )


def _network_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--redis", metavar="HOST:PORT", help="of a server that may be emptied; else one is started"
    )
    _size_flag(parser, "128MiB")


def _object_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--directory", metavar="DIR", help="for the server's objects")
    _size_flag(parser, "128MiB")


def _no_flags(parser: argparse.ArgumentParser) -> None:
    """Takes what every question takes, nothing else."""


QUESTIONS = {
    "index": Question("the index from Python, beside vLLM's", _index_flags, rounds=7),
    "manager": Question("a request with two tiers, beside vLLM's", _manager_flags, rounds=7),
    "transfer": Question("KV cache to slots and back, beside plain copies", _transfer_flags),
    "file": Question("the file tier, beside fio and vLLM's on the same directory", _file_flags),
    "scheduler": Question("vLLM's scheduler with our and its tiers", _scheduler_flags, rounds=5),
    "engine": Question(
        "vLLM's CPU engine: time to first token by where the prefix is", _no_flags, rounds=9
    ),
    "network": Question("the redis tier, beside a plain socket and redis-py", _network_flags),
    "object": Question("the object tier, beside boto3 on the same S3 server", _object_flags),
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
    for name, asked in QUESTIONS.items():
        question = questions.add_parser(
            name,
            help=asked.summary,
            description=f"{asked.summary}.",
            formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        )
        asked.add_flags(question)
        question.add_argument(
            "--rounds", type=int, default=asked.rounds, metavar="N", help="of each figure"
        )
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
