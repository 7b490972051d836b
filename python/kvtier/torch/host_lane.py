"""Transfers of KV caches in host memory: the Rust copier on one worker thread.

The worker spends its time in Rust, off the interpreter's lock, so the engine's thread goes on.
One worker keeps jobs in order: a load never overtakes the store that still reads its blocks.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, cast

import numpy as np
import torch
from numpy.typing import NDArray

from kvtier._kvtier import HostCopier, Region

if TYPE_CHECKING:
    from typing_extensions import Buffer

__all__ = ["HostJob", "HostLane"]


class HostJob:
    """A copy that runs on the lane's worker; see `TransferJob`."""

    def __init__(self, size: int, result: Future[float]) -> None:
        """`size` is in bytes; `result` gives the seconds that the copy took."""
        self._size = size
        self._result = result

    @property
    def bytes(self) -> int:
        """Bytes that the job moves."""
        return self._size

    @property
    def seconds(self) -> float:
        """Time the copy took; waits for the job."""
        return self._result.result()

    def done(self) -> bool:
        """Whether every byte has arrived."""
        return self._result.done()

    def wait(self) -> None:
        """Waits until every byte has arrived; raises what the copy raised."""
        self._result.result()


class HostLane:
    """Runs copies of CPU tensors one after the other; see `TransferLane`."""

    def __init__(
        self, region: Region, canonical: Sequence[torch.Tensor], blocks_per_chunk: int
    ) -> None:
        """`canonical` are the int8 tensors `(num_blocks, page_bytes)` of a KV cache."""
        # The stubs of numpy name the buffer protocol only from Python 3.12 on.
        pages = cast("list[Buffer]", [tensor.numpy() for tensor in canonical])
        self._copier = HostCopier(region, pages, blocks_per_chunk)
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="kvtier-copy")

    def submit(
        self, block_ids: NDArray[np.int64], slots: NDArray[np.uint32], *, to_slots: bool
    ) -> HostJob:
        """Queues the copy; the arrays must not change until it is done."""
        copy = self._copier.store if to_slots else self._copier.load
        result = self._worker.submit(_timed, copy, block_ids, slots)
        return HostJob(len(slots) * self._copier.chunk_bytes, result)

    def close(self) -> None:
        """Waits for running copies and ends the worker. Idempotent."""
        self._worker.shutdown(wait=True)


def _timed(
    copy: Callable[[NDArray[np.int64], NDArray[np.uint32]], int],
    block_ids: NDArray[np.int64],
    slots: NDArray[np.uint32],
) -> float:
    began = time.perf_counter()
    copy(block_ids, slots)
    return time.perf_counter() - began
