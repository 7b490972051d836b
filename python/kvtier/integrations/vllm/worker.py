"""The worker's side: moves blocks between the KV cache and the slots of the region.

Stores and loads have a thread each, and keep their order among themselves. vLLM keeps what they
touch apart: it waits for a store before it gives the blocks away, and loads a chunk only when its
store is complete. It starts stores at the beginning of a step, when the blocks they read are
written, and on a CPU all computing of a step is over before the next one begins.

vLLM has no word for a transfer that failed; one that does stops the engine, which is what a bug
in here deserves: ids that do not exist, nothing else, makes it fail.
"""

from __future__ import annotations

import time
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

import numpy as np
import torch
from vllm.v1.kv_offload.base import (
    CanonicalKVCaches,
    GPULoadStoreSpec,
    OffloadingWorker,
    TransferResult,
)
from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec

from kvtier._kvtier import Region
from kvtier.errors import TransferError
from kvtier.integrations.vllm.host_copies import HostCopies
from kvtier.integrations.vllm.layout import SlotLayout, group_fragments

__all__ = ["KVTierOffloadingWorker"]


class KVTierOffloadingWorker(OffloadingWorker):
    """Transfers of one rank."""

    def __init__(
        self, config: Any, layout: SlotLayout, region: Region, kv_caches: CanonicalKVCaches
    ) -> None:
        """Takes views of the KV cache and of the region.

        Raises `LayoutError` when they do not fit together, and `TransferError` for a KV cache
        that is not in host memory.
        """
        tensors = []
        for cache in kv_caches.tensors:
            if cache.tensor.device.type != "cpu":
                raise TransferError(
                    f"KV caches on {cache.tensor.device} can not be moved by this version: use cpu"
                )
            tensors.append(cache.tensor.view(torch.int8).numpy())
        page_bytes = [cache.page_size_bytes for cache in kv_caches.tensors]
        fragments = group_fragments(config, layout, page_bytes, kv_caches.group_data_refs)
        self._groups = [HostCopies(region, layout, tensors, group) for group in fragments]
        self._blocks_per_chunk = layout.blocks_per_chunk
        self._stores = ThreadPoolExecutor(1, thread_name_prefix="kvtier-store")
        self._loads = ThreadPoolExecutor(1, thread_name_prefix="kvtier-load")
        self._running: dict[int, Future[tuple[int, float]]] = {}

    def submit_store(
        self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: CPULoadStoreSpec
    ) -> bool:
        """Queues blocks to slots."""
        self._running[job_id] = self._stores.submit(self._move, src_spec, dst_spec, to_slots=True)
        return True

    def submit_load(
        self,
        job_id: int,
        src_spec: CPULoadStoreSpec,
        dst_spec: GPULoadStoreSpec,
        expedited: bool = False,  # noqa: ARG002  (loads never wait for stores)
    ) -> bool:
        """Queues slots to blocks."""
        self._running[job_id] = self._loads.submit(self._move, dst_spec, src_spec, to_slots=False)
        return True

    def get_finished(self) -> list[TransferResult]:
        """Transfers that ended since the last call; raises what one of them raised."""
        ended = [job_id for job_id, job in self._running.items() if job.done()]
        results = []
        for job_id in ended:
            size, seconds = self._running.pop(job_id).result()
            results.append(TransferResult(job_id, True, size, seconds))
        return results

    def wait(self, job_ids: set[int]) -> None:
        """Waits for those of the transfers that run."""
        wait([job for job_id, job in self._running.items() if job_id in job_ids])

    def shutdown(self) -> None:
        """Waits for all transfers."""
        self._stores.shutdown()
        self._loads.shutdown()
        self._running.clear()

    def _move(
        self, of_blocks: GPULoadStoreSpec, of_slots: CPULoadStoreSpec, *, to_slots: bool
    ) -> tuple[int, float]:
        """Moves group by group; returns bytes and seconds."""
        began = time.perf_counter()
        blocks = of_blocks.block_ids.astype(np.int64)
        slots = of_slots.block_ids.astype(np.int64)
        size = 0
        for group, count, index in zip(
            self._groups, of_blocks.group_sizes, of_blocks.block_indices, strict=True
        ):
            if not count:
                continue
            # The first chunk may begin in the middle.
            first = index % self._blocks_per_chunk
            chunks = -(-(first + count) // self._blocks_per_chunk)
            copy = group.store if to_slots else group.load
            size += copy(blocks[:count], slots[:chunks], first)
            blocks, slots = blocks[count:], slots[chunks:]
        if len(blocks) or len(slots):
            raise TransferError(
                f"{len(blocks)} blocks and {len(slots)} slots are left over of a transfer of "
                f"{of_blocks!r} and {of_slots!r}"
            )
        return size, time.perf_counter() - began
