"""The command line: `kvtier COMMAND`.

Every command is one module of this package with `add_parser(subparsers)`, which sets `run` to
a function from parsed arguments to an exit code. Parsing imports nothing heavy; a command
imports torch or rich when it runs.

Exit codes: 0 done and as expected; 1 ran and found a difference; 2 could not run, one line on
standard error says what to change; 130 interrupted.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from kvtier import __version__
from kvtier.cli import bench, demo, doctor, exporter, inspect, replay, top, verify
from kvtier.cli.interrupts import interruptible
from kvtier.errors import KvTierError

__all__ = ["main"]

_COMMANDS = (demo, replay, bench, verify, inspect, top, exporter, doctor)

EXIT_REFUSED = 2
EXIT_INTERRUPTED = 130


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line, without the usage text."""

    def error(self, message: str) -> NoReturn:
        self.exit(EXIT_REFUSED, f"{self.prog}: error: {_one_line(message)}\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; returns its exit code. `argv` is without the program's name."""
    parser = _make_parser()
    try:
        arguments, unknown = parser.parse_known_args(argv)
    except SystemExit as exit_:  # argparse has printed its line, the help or the version
        return exit_.code if isinstance(exit_.code, int) else EXIT_REFUSED
    prog = f"kvtier {arguments.command}"
    if unknown:
        _complain(f"{prog}: error: unknown arguments {' '.join(unknown)}; see {prog} --help")
        return EXIT_REFUSED
    try:
        with interruptible():
            code: int = arguments.run(arguments)
            sys.stdout.flush()
    except KeyboardInterrupt:
        _complain(f"{prog}: interrupted")
        if argv is None:
            # The process is ours and everything in it is closed. To take an interpreter with
            # torch in it apart would use up most of the second that a user waits.
            sys.stderr.flush()
            os._exit(EXIT_INTERRUPTED)
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # The reader of our output has left. Python would complain once more at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_REFUSED
    except (KvTierError, OSError, MemoryError) as error:
        _complain(f"{prog}: error: {_reason(error)}")
        return EXIT_REFUSED
    return code


def _make_parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="kvtier",
        description="The KV cache of LLM inference in tiers: GPU, host memory, disk.",
    )
    parser.add_argument("--version", action="version", version=f"kvtier {__version__}")
    subparsers = parser.add_subparsers(
        dest="command", metavar="COMMAND", required=True, parser_class=_Parser
    )
    for command in _COMMANDS:
        command.add_parser(subparsers)
    return parser


def _complain(line: str) -> None:
    print(line, file=sys.stderr)


def _reason(error: BaseException) -> str:
    if isinstance(error, MemoryError):
        return "out of memory; ask for less"
    # Details that a message puts into further lines are for logs.
    return str(error).partition("\n")[0].strip() or type(error).__name__


def _one_line(text: str) -> str:
    return " ".join(text.split())
