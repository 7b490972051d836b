"""Transfers of KV caches in host memory: the Rust copier, on one worker thread a lane.

A worker spends its time in Rust, off the interpreter's lock, so the engine's thread goes on.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, cast

from kvtier._kvtier import HostCopier, Moves, Region
from kvtier.torch.chunk_layout import ChunkLayout
from kvtier.torch.ordering import Lane

if TYPE_CHECKING:
    from typing_extensions import Buffer

__all__ = ["HostCopy", "HostLanes"]


class HostCopy:
    """A copy that queues or runs on a worker; see `LaneCopy`."""

    def __init__(self, result: Future[tuple[float, float]]) -> None:
        """`result` gives when the copy began, and the seconds that it took."""
        self._result = result

    @property
    def began(self) -> float:
        """When the copy began; waits for it."""
        return self._result.result()[0]

    @property
    def seconds(self) -> float:
        """Time the copy took; waits for it."""
        return self._result.result()[1]

    @property
    def error(self) -> BaseException | None:
        """What the copy raised; waits for it."""
        return self._result.exception()

    def done(self) -> bool:
        """Whether the copy has ended."""
        return self._result.done()

    def wait(self) -> None:
        """Waits for the copy; raises what it raised."""
        self._result.result()

    def before_compute(self) -> None:
        """Waits: what the host computes next is ordered by that alone."""
        self.wait()


class HostLanes:
    """Runs copies of CPU tensors; see `TransferLanes`."""

    def __init__(self, region: Region, layout: ChunkLayout, blocks_per_chunk: int) -> None:
        """Raises `TransferError` when a chunk does not fit into a slot."""
        # The stubs of numpy name the buffer protocol only from Python 3.12 on.
        rows = cast("list[Buffer]", [tensor.numpy() for tensor in layout.tensors])
        groups = [(group.block_bytes, group.pieces) for group in layout.groups]
        self._copier = HostCopier(region, rows, groups, blocks_per_chunk=blocks_per_chunk)
        self._workers = {
            lane: ThreadPoolExecutor(1, thread_name_prefix=f"kvtier-{lane.name.lower()}")
            for lane in Lane
        }

    def submit(
        self, lane: Lane, parts: Sequence[tuple[int, Moves]], after: Sequence[HostCopy]
    ) -> HostCopy:
        """Queues the copy of `(group, moves)` pairs behind its lane's and behind `after`."""
        return HostCopy(self._workers[lane].submit(self._run, parts, after))

    def _run(
        self, parts: Sequence[tuple[int, Moves]], after: Sequence[HostCopy]
    ) -> tuple[float, float]:
        # Jobs wait for earlier ones only, so workers can not wait for each other in a circle. A
        # job that failed is over too; whoever waits for it is told.
        for job in after:
            _ = job.error
        began = time.monotonic()
        for group, moves in parts:
            self._copier.run(group, moves)
        return began, time.monotonic() - began

    def close(self) -> None:
        """Waits for queued copies and ends the workers. Idempotent."""
        for worker in self._workers.values():
            worker.shutdown(wait=True)
