"""The thread of a tier: makes the tier, and every call into it.

Whatever the tier raises is counted and logged, and the thread goes on. The loop holds on to
nothing of a call that is over: a job that the tier dropped is gone.
"""

from __future__ import annotations

import atexit
import traceback
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any

from kvtier._kvtier import TierPort
from kvtier.tiers.contract import SecondaryTier, TierContext

__all__ = ["start"]

# How often a wait lets the main thread notice Ctrl-C.
_SIGNAL_CHECK_S = 0.05

# Tiers whose threads have not ended: an interpreter that ends closes them first.
_open: set[TierPort] = set()


def start(
    port: TierPort,
    tier: type[SecondaryTier],
    name: str,
    chunk_bytes: int,
    key_bytes: int,
    namespace: str,
    region: memoryview,
    settings: dict[str, Any],
) -> None:
    """Begins the thread of a tier, and raises what its constructor raises."""
    context = TierContext(name, chunk_bytes, key_bytes, namespace, region, port.notify)
    opened: SimpleQueue[BaseException | None] = SimpleQueue()
    thread = Thread(
        target=_run,
        args=(port, tier, context, settings, opened),
        name=f"kvtier-{name}",
        daemon=True,
    )
    # Again at its end: what was registered last runs first.
    atexit.unregister(_close_all)
    atexit.register(_close_all)
    _open.add(port)
    try:
        thread.start()
        error = _wait_for(opened)
    except BaseException:
        # Interrupted: when the tier is open, the thread closes it.
        port.begin_close()
        _open.discard(port)
        raise
    if error is not None:
        try:
            raise error
        finally:
            del error


def _wait_for(opened: SimpleQueue[BaseException | None]) -> BaseException | None:
    """Waits in slices: a signal that comes just before a wait begins does not end it."""
    while True:
        try:
            return opened.get(timeout=_SIGNAL_CHECK_S)
        except Empty:
            continue


def _run(
    port: TierPort,
    tier: type[SecondaryTier],
    context: TierContext,
    settings: dict[str, Any],
    opened: SimpleQueue[BaseException | None],
) -> None:
    port.begins()
    try:
        try:
            made = tier(context, **settings)
        except BaseException as error:
            opened.put(error)
            return
        try:
            port.usage(made.usage())
        except BaseException as error:
            _contain(port, "usage", error)
        opened.put(None)
        _serve(port, made)
        try:
            made.shutdown()
        except BaseException as error:
            _contain(port, "shutdown", error)
    finally:
        port.ends()
        _open.discard(port)


def _serve(port: TierPort, tier: SecondaryTier) -> None:
    while (call := port.next()) is not None:
        method, argument = call
        try:
            if method == "finished":
                fresh = port.report(tier.finished())
                if port.removed(tier.take_removed()) or fresh:
                    port.usage(tier.usage())
            elif method == "lookup":
                port.answer(tier.lookup(argument))
            else:
                getattr(tier, method)(argument)
        except BaseException as error:
            _contain(port, method, error)
        del call, argument


def _contain(port: TierPort, method: str, error: BaseException) -> None:
    port.raised(method, error)
    # The frames of the tier's code may hold a job, and somebody may keep the error.
    traceback.clear_frames(error.__traceback__)


def _close_all() -> None:
    ports = list(_open)
    for port in ports:
        port.begin_close()
    for port in ports:
        port.close()
