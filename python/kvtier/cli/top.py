"""`kvtier top`: what the tiers of running processes do, live."""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvtier.cli.top_figures import ManagerRecord

__all__ = ["add_parser", "run"]

_PIPE_COLUMNS = 140
# One reading: the managers, and why other pages could not be read.
_Shown = tuple[list["ManagerRecord"], list[str]]


def add_parser(subparsers: argparse._SubParsersAction[Any]) -> None:
    """Adds the command and its flags."""
    parser = subparsers.add_parser(
        "top",
        help="what the tiers of running processes do, live",
        description="Shows the tiers of all kvtier processes of this user (root: of all users): "
        "how full they are, what they hit and move, and what goes wrong. Reads their stats pages; "
        "the processes notice nothing. Ctrl-C ends it.",
    )
    parser.add_argument("pids", type=int, nargs="*", metavar="PID", help="only these processes")
    parser.add_argument(
        "--interval", type=_seconds, default=1.0, metavar="S", help="seconds between readings (1)"
    )
    parser.add_argument(
        "--once", action="store_true", help="read twice, an interval apart, print and end"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object a reading")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Shows until it is interrupted. Raises `StatsPageError` when there can be no pages."""
    readings = _readings(arguments.pids, arguments.interval)
    next(readings)  # a rate needs two
    try:
        if arguments.json:
            _print_json(readings, once=arguments.once)
        elif arguments.once or not sys.stdout.isatty():
            _print(readings, once=arguments.once)
        else:
            _live(readings)
    except KeyboardInterrupt:  # how one leaves it
        return 0
    return 0


def _readings(pids: Sequence[int], interval: float) -> Iterator[_Shown]:
    """What to show, every `interval` seconds."""
    from kvtier.cli.top_figures import History
    from kvtier.pages import read_pages

    history = History()
    due = time.monotonic()
    while True:
        found = read_pages()
        pages = [page for page in found.pages if not pids or page["pid"] in pids]
        managers = history.add(pages, time.monotonic())
        yield managers, [*found.refused, *history.refused]
        due = max(due + interval, time.monotonic())
        time.sleep(max(0.0, due - time.monotonic()))


def _print_json(readings: Iterator[_Shown], *, once: bool) -> None:
    for managers, refused in readings:
        print(json.dumps({"time": time.time(), "managers": managers, "refused": refused}))
        sys.stdout.flush()
        if once:
            return


def _print(readings: Iterator[_Shown], *, once: bool) -> None:
    from rich.console import Console

    console = Console(width=None if sys.stdout.isatty() else _PIPE_COLUMNS, highlight=False)
    show = _screen()
    for reading in readings:
        console.print(show(*reading))
        sys.stdout.flush()
        if once:
            return


def _live(readings: Iterator[_Shown]) -> None:
    from rich.live import Live

    show = _screen()
    with Live(screen=True, auto_refresh=False) as live:
        for reading in readings:
            live.update(show(*reading), refresh=True)


def _screen() -> Callable[[list[ManagerRecord], list[str]], Any]:
    from kvtier.cli.top_screen import screen
    from kvtier.pages import stats_directory

    where = stats_directory() or ""
    return lambda managers, refused: screen(managers, refused, where)


def _seconds(text: str) -> float:
    seconds = float(text)
    if not 0 < seconds < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is no time to wait; it must be above 0")
    return seconds
