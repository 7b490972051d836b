"""The progress bar of long commands: on a terminal, and nowhere else."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
)

__all__ = ["progress_bar"]


@contextlib.contextmanager
def progress_bar(total: int | None, text: str = "") -> Iterator[Callable[[str | None, int], None]]:
    """A progress bar over `total` steps, or nobody knows how many (None).

    It is on standard error if that is a terminal, else there is nothing.

    Yields what is called with what is going on (None: the same) and the steps done.
    """
    if not sys.stderr.isatty():
        yield lambda _text, _steps: None
        return
    bar = Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=Console(stderr=True),
        transient=True,
    )
    with bar:
        task = bar.add_task(text, total=total)
        yield lambda text, steps: bar.update(task, advance=steps, description=text)
