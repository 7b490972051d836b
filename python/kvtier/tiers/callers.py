"""Threads that make calls which may hang, for tiers on libraries without deadlines.

A call into such a library can not be broken off. So nobody waits for one: it runs on a thread of a
*lane*, and when it takes longer than `patience_s` it counts as hanging, and another thread stands
in for its own. A lane has at most `_STAND_INS` threads more than it was made with; when all of them
hang, what is queued waits. Threads begin with the first call that needs them.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Mapping
from threading import Condition, Thread

__all__ = ["Callers"]

_STAND_INS = 8

_log = logging.getLogger("kvtier")


class _Lane:
    """Calls that wait, and the threads that take them. Guarded by the lock of `Callers`."""

    def __init__(self, threads: int) -> None:
        self.threads = threads
        self.queue: deque[Callable[[], None]] = deque()
        self.alive = 0
        self.idle = 0
        self.began: dict[object, float] = {}
        """When the calls that run began."""

    def wants_thread(self, patience_s: float) -> bool:
        """Whether a call waits that no thread would take soon."""
        if len(self.queue) <= self.idle:
            return False
        now = time.monotonic()
        hanging = sum(now - began > patience_s for began in self.began.values())
        return self.alive - hanging < self.threads and self.alive < self.threads + _STAND_INS


class Callers:
    """The lanes of one tier, by name; see the module."""

    def __init__(self, name: str, lanes: Mapping[str, int], patience_s: float) -> None:
        self._name = name
        self._patience_s = patience_s
        self._changed = Condition()
        self._lanes = {lane: _Lane(threads) for lane, threads in lanes.items()}
        self._closed = False
        self._last: Callable[[], None] | None = None

    def submit(self, lane: str, call: Callable[[], None]) -> None:
        """Queues a call; after `close` it is dropped."""
        with self._changed:
            if self._closed:
                return
            self._lanes[lane].queue.append(call)
            self._changed.notify_all()
        self.tend()

    def tend(self) -> None:
        """Has others stand in for threads whose calls hang; to be called now and then."""
        for name, lane in self._lanes.items():
            while True:
                with self._changed:
                    if self._closed or not lane.wants_thread(self._patience_s):
                        break
                    lane.alive += 1
                thread = Thread(
                    target=self._work, args=(lane,), name=f"kvtier-{self._name}-{name}", daemon=True
                )
                try:
                    thread.start()
                except BaseException:
                    with self._changed:
                        lane.alive -= 1
                    raise

    def close(self, patience_s: float, last: Callable[[], None]) -> bool:
        """Drops what is queued and ends the threads; false if one still hangs after `patience_s`.

        `last` is called when all have ended: here, or on the thread that ends last.
        """
        with self._changed:
            self._closed = True
            dropped = [lane.queue for lane in self._lanes.values()]
            for lane in self._lanes.values():
                lane.queue = deque()
            self._changed.notify_all()
            ended = self._changed.wait_for(self._all_ended, patience_s)
            if not ended:
                self._last = last
        del dropped  # outside the lock: a job may go with it
        if ended:
            last()
        return ended

    def _all_ended(self) -> bool:
        return not any(lane.alive for lane in self._lanes.values())

    def _work(self, lane: _Lane) -> None:
        me = object()
        while (call := self._next(lane, me)) is not None:
            try:
                call()
            except Exception:
                _log.exception('tier "%s": a call failed', self._name)
            # A job may go with it, and must before the thread waits.
            del call
            with self._changed:
                del lane.began[me]
        with self._changed:
            lane.alive -= 1
            last = self._last if self._all_ended() else None
            self._changed.notify_all()
        if last is not None:
            last()

    def _next(self, lane: _Lane, me: object) -> Callable[[], None] | None:
        """Waits for a call; none when it is closed, or when this thread only stood in."""
        with self._changed:
            while not self._closed:
                if lane.queue:
                    lane.began[me] = time.monotonic()
                    return lane.queue.popleft()
                if lane.alive > lane.threads:
                    return None
                lane.idle += 1
                self._changed.wait()
                lane.idle -= 1
            return None
