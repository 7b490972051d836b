"""Ctrl-C and SIGTERM end a command within a second, with everything closed.

Python runs its handlers between two bytecodes, so code that stays in C for seconds delays them.
That happens when torch is imported. Nothing is open yet then, so `heavy_import` lets the system's
own handling end the process on the spot; afterwards both signals raise `KeyboardInterrupt`,
which unwinds and closes.
"""

from __future__ import annotations

import contextlib
import importlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType, ModuleType

__all__ = ["heavy_import", "interruptible"]

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


def _interrupt(_number: int, _frame: FrameType | None) -> None:
    # Once is enough: a second Ctrl-C must not stop the clean-up half-way.
    for number in _SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    raise KeyboardInterrupt


@contextlib.contextmanager
def _handlers(handler: signal.Handlers | object) -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread may set handlers; a caller in a thread has its own
        return
    before = {number: signal.signal(number, handler) for number in _SIGNALS}  # type: ignore[arg-type]
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, signal.SIG_DFL if old is None else old)


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Inside, both signals raise `KeyboardInterrupt`, once; the old handlers come back."""
    with _handlers(_interrupt):
        yield


def heavy_import(name: str) -> ModuleType:
    """Imports module `name`; a signal meanwhile ends the process at once.

    Only for use while the process has nothing to close.
    """
    with _handlers(signal.SIG_DFL):
        return importlib.import_module(name)
