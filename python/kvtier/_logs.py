"""Hands the core's warnings and errors to the logger "kvtier".

A thread does it, so that a slow handler holds nobody up. It begins with the first manager, and
`atexit` ends it when what was logged is handed over.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import threading

from kvtier._kvtier import LogLines

__all__ = ["start"]

_PATIENCE_S = 1.0


def start() -> None:
    """Begins, once in a process."""
    lines = LogLines.open()
    if lines is None:
        return
    thread = threading.Thread(target=_forward, args=(lines,), name="kvtier-logs", daemon=True)
    thread.start()
    atexit.register(_stop, lines, thread)


def _forward(lines: LogLines) -> None:
    logger = logging.getLogger("kvtier")
    while (line := lines.next()) is not None:
        # A handler's own trouble must not end the others' lines.
        with contextlib.suppress(Exception):
            logger.log(*line)


def _stop(lines: LogLines, thread: threading.Thread) -> None:
    lines.close()
    if thread.is_alive():  # not in a process that fork made
        thread.join(_PATIENCE_S)
