"""Registers the primary region with CUDA, piece by piece, while the engine starts.

Pinning a large region takes seconds, and drivers refuse or stall on very large registrations. So
a thread does it in pieces that end where slots end; the slots of a finished piece are pinned,
transfers of others go through pageable memory. What the driver refuses stays pageable: that is
logged once and said by `failure`.
"""

from __future__ import annotations

import logging
import threading
from typing import Protocol

import torch

from kvtier.errors import DeviceError

__all__ = ["PinnedRegion", "RegisteringDriver"]

_PIECE_BYTES = 1 << 30

_log = logging.getLogger(__name__)


class RegisteringDriver(Protocol):
    """What is needed of `kvtier.torch.cuda_driver.Driver`."""

    def context(self) -> int:
        """The context that is current in this thread."""

    def use_context(self, context: int) -> None:
        """Makes a context current in this thread."""

    def register(self, address: int, size: int) -> None:
        """Pins host memory."""

    def unregister(self, address: int) -> None:
        """Undoes `register`."""


class PinnedRegion:
    """Registers host memory with CUDA for as long as it is open."""

    def __init__(
        self, rows: torch.Tensor, driver: RegisteringDriver, *, piece_bytes: int = _PIECE_BYTES
    ) -> None:
        """Starts to register `rows`, contiguous uint8 `(slots, slot_bytes)` in host memory."""
        self._rows = rows  # keeps the mapping alive while the driver knows its address
        self._driver = driver
        self._slots_per_piece = max(1, piece_bytes // rows.shape[1])
        self._context = driver.context()
        self._pieces: list[int] = []
        self._pinned_slots = 0
        self._failure: str | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._register, name="kvtier-pin", daemon=True)
        self._thread.start()

    @property
    def pinned_slots(self) -> int:
        """Slots from the first on that are pinned by now; it only grows until `close`."""
        return self._pinned_slots

    @property
    def failure(self) -> str | None:
        """Why some slots stay pageable; None while nothing failed."""
        return self._failure

    def wait(self) -> int:
        """Waits until every piece was tried; returns the pinned slots."""
        self._thread.join()
        return self._pinned_slots

    def close(self) -> None:
        """Undoes the registration, after the piece under way. Idempotent."""
        self._stop.set()
        self._thread.join()
        self._pinned_slots = 0
        while self._pieces:
            try:
                self._driver.unregister(self._pieces.pop())
            except DeviceError as error:
                _log.warning("a piece of the primary region stays pinned: %s", error)

    def _register(self) -> None:
        slots, slot_bytes = self._rows.shape
        try:
            self._driver.use_context(self._context)
            for first in range(0, slots, self._slots_per_piece):
                if self._stop.is_set():
                    return
                last = min(first + self._slots_per_piece, slots)
                address = self._rows.data_ptr() + first * slot_bytes
                self._driver.register(address, (last - first) * slot_bytes)
                self._pieces.append(address)
                self._pinned_slots = last
        except DeviceError as error:
            self._failure = str(error)
            _log.warning(
                "%d of %d slots of the primary region are pinned, transfers of the others are "
                "slower: %s; raise the limit of locked memory (ulimit -l) or make the region "
                "smaller",
                self._pinned_slots,
                slots,
                error,
            )
