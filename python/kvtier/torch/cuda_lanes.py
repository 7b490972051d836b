"""Transfers of KV caches on a CUDA device, on one stream a lane.

Order between the streams:

* every job waits for what the compute stream had queued when it was submitted: a store reads what
  that writes, and a load must not be overwritten by it;
* a job waits for the earlier jobs of other lanes that the engine names;
* the compute stream waits for a load only where it is told to (`CudaCopy.before_compute`).

Slots that are not pinned (yet, or at all) are copied through pageable memory. A stream whose jobs
go through staging has a buffer of up to 64 MiB on the device for it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

import torch

from kvtier._kvtier import Moves
from kvtier.torch.chunk_layout import ChunkLayout
from kvtier.torch.copy_paths import (
    BatchedMemcpy,
    CopyPath,
    GroupTable,
    KernelCopy,
    PiecewiseCopy,
    StagedCopy,
    move_table,
)
from kvtier.torch.cuda_driver import Driver
from kvtier.torch.ordering import Lane
from kvtier.torch.path_choice import Measured, choose_paths
from kvtier.torch.pinned_region import PinnedRegion

__all__ = ["CudaCopy", "CudaLanes"]

_STAGING_BYTES = 64 << 20
_KERNEL_PROGRAMS = 16
_STAGING_PROGRAMS = 32
_URGENT, _NORMAL = -1, 0

_log = logging.getLogger(__name__)


class DeviceClock:
    """Times of events on a device, on the clock of `time.monotonic`.

    Events only tell the milliseconds between two of them, in single precision: so each time is
    that of the event before it and a short way further, and hours do not blur it.
    """

    def __init__(self, device: torch.device) -> None:
        """Waits for the device, once."""
        self._last = torch.cuda.Event(enable_timing=True)
        self._last.record(torch.cuda.current_stream(device))
        self._last.synchronize()
        self._time = time.monotonic()

    def time(self, event: torch.cuda.Event) -> float:
        """When `event` passed, which it has."""
        self._time += float(self._last.elapsed_time(event)) / 1e3
        self._last = event
        return self._time


class CudaCopy:
    """Copies on a lane's stream; see `LaneCopy`."""

    def __init__(
        self,
        began: torch.cuda.Event,
        ended: torch.cuda.Event,
        device: torch.device,
        clock: DeviceClock,
    ) -> None:
        """The events enclose the copies."""
        self._began = began
        self.ended = ended
        self._device = device
        self._clock = clock

    @property
    def began(self) -> float:
        """When the first event passed; waits for the copy."""
        self.ended.synchronize()
        return self._clock.time(self._began)

    @property
    def seconds(self) -> float:
        """Time between the events on the device; waits for the copy."""
        self.ended.synchronize()
        return float(self._began.elapsed_time(self.ended)) / 1e3

    @property
    def error(self) -> BaseException | None:
        """What the device reports when it gets there; waits for it."""
        try:
            self.ended.synchronize()
        except RuntimeError as error:
            return error
        return None

    def done(self) -> bool:
        """Whether the copy has ended; one that failed has, as `error` tells."""
        try:
            return bool(self.ended.query())
        except RuntimeError:
            return True

    def wait(self) -> None:
        """Waits for the copy."""
        self.ended.synchronize()

    def before_compute(self) -> None:
        """Makes the current stream wait for the copy; the host goes on."""
        torch.cuda.current_stream(self._device).wait_event(self.ended)


class CudaLanes:
    """Runs copies of CUDA tensors; see `TransferLanes`."""

    def __init__(self, slots: torch.Tensor, layout: ChunkLayout, blocks_per_chunk: int) -> None:
        """Measures the copy paths, then starts to register the region in the background.

        `slots` is the region as uint8 `(slots, slot_bytes)`. Raises `DeviceError` where there is
        no driver to register it with.
        """
        self._device = layout.device
        self._slots = slots
        self._blocks_per_chunk = blocks_per_chunk
        self._tables = [
            GroupTable(layout.tensors, group, blocks_per_chunk) for group in layout.groups
        ]
        with torch.cuda.device(self._device):
            self._streams = {
                lane: torch.cuda.Stream(
                    self._device, priority=_URGENT if lane is Lane.EXPEDITED else _NORMAL
                )
                for lane in Lane
            }
            self._clock = DeviceClock(self._device)
            driver = Driver()
            self._fallbacks: list[CopyPath] = [PiecewiseCopy()]
            paths: list[CopyPath] = [BatchedMemcpy(driver, Driver.IN_STREAM_ORDER, Driver.ANY_TIME)]
            if _has_triton():
                staged = StagedCopy(_STAGING_BYTES, _STAGING_PROGRAMS)
                paths += [KernelCopy(_KERNEL_PROGRAMS), staged]
                self._fallbacks.insert(0, staged)
            stream = self._streams[Lane.STORE]
            with torch.cuda.stream(stream):
                self._measured = choose_paths(
                    paths,
                    layout.groups,
                    [tensor.shape[1] for tensor in layout.tensors],
                    blocks_per_chunk,
                    self._device,
                    stream.cuda_stream,
                    _timed_on_device,
                )
            # Not before: the driver makes others wait while it pins, which figures would show.
            self._pinned = PinnedRegion(slots, driver)

    @property
    def pinned(self) -> PinnedRegion:
        """The registration of the region."""
        return self._pinned

    @property
    def measured(self) -> dict[tuple[int, bool], list[Measured]]:
        """What the paths did, by `(group, to_slots)`, the fastest first."""
        return self._measured

    def submit(
        self, lane: Lane, parts: Sequence[tuple[int, Moves]], after: Sequence[CudaCopy]
    ) -> CudaCopy:
        """Queues `(group, moves)` pairs behind the compute stream's work and `after`."""
        stream = self._streams[lane]
        with torch.cuda.device(self._device):
            stream.wait_stream(torch.cuda.current_stream(self._device))
            for copy in after:
                stream.wait_event(copy.ended)
            began = torch.cuda.Event(enable_timing=True)
            ended = torch.cuda.Event(enable_timing=True)
            with torch.cuda.stream(stream):
                began.record(stream)
                for group, moves in parts:
                    table = move_table(moves, self._blocks_per_chunk)
                    self._path(group, moves).copy(
                        self._tables[group],
                        table,
                        self._slots,
                        to_slots=moves.to_slots,
                        sources_ready=not after,
                        stream=stream.cuda_stream,
                    )
                ended.record(stream)
        return CudaCopy(began, ended, self._device, self._clock)

    def _path(self, group: int, moves: Moves) -> CopyPath:
        measured = self._measured[group, moves.to_slots]
        if measured and (not len(moves) or int(moves.slots.max()) < self._pinned.pinned_slots):
            return measured[0].path
        return next(
            path
            for path in self._fallbacks
            if path.fits(self._tables[group], to_slots=moves.to_slots, pinned=False)
        )

    def close(self) -> None:
        """Waits for queued copies and undoes the registration. Idempotent."""
        for stream in self._streams.values():
            stream.synchronize()
        self._pinned.close()


def _has_triton() -> bool:
    try:
        import triton  # noqa: F401
    except ImportError:
        _log.warning("without Triton, small pages are copied more slowly")
        return False
    return True


def _timed_on_device(run: Callable[[], None]) -> float:
    began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    began.record()
    run()
    ended.record()
    ended.synchronize()
    return float(began.elapsed_time(ended)) / 1e3
