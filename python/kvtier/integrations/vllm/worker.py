"""The worker's side: one rank's transfers between its KV cache and the slots of the region.

`kvtier.torch.TransferEngine` moves the bytes, on lanes of the KV cache's device. What vLLM does
and what the engine does fit together so:

* vLLM submits stores at the beginning of a step, when the blocks they read are written or, on a
  GPU, queued to be written: a store follows what the compute stream has queued.
* A load follows it too, since that may still write or clear its blocks. The request computes only
  when `get_finished` has told of it.
* An expedited load (0.33) is waited for within the step, so it has a lane of its own.
* vLLM waits for a store before it gives the blocks away (`wait`).

vLLM 0.32 and 0.33 have no way to go on after a transfer that failed: a `TransferResult` without
success is an assertion, and so is a submission that is refused; nothing tells the scheduler that
blocks were not loaded or a slot not filled, and to report success would serve other bytes than were
stored. So it is raised here, with its reason, and stops the engine. Ids that do not exist and a GPU
that broke are what can make one fail.
"""

from __future__ import annotations

from vllm.v1.kv_offload.base import (
    GPULoadStoreSpec,
    OffloadingWorker,
    TransferResult,
)
from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec

from kvtier._kvtier import Region
from kvtier.errors import TransferError
from kvtier.torch.chunk_layout import ChunkLayout
from kvtier.torch.transfers import GroupBlocks, TransferEngine, TransferJob

__all__ = ["KVTierOffloadingWorker"]


class KVTierOffloadingWorker(OffloadingWorker):
    """Transfers of one rank."""

    def __init__(self, region: Region, layout: ChunkLayout, blocks_per_chunk: int) -> None:
        """Opens the lanes of the KV cache's device.

        Raises `TransferError` as `TransferEngine.register` does, and `DeviceError` for a GPU
        without a CUDA driver.
        """
        self._blocks_per_chunk = blocks_per_chunk
        self._transfers = TransferEngine(region, layout, blocks_per_chunk)
        self._running: dict[int, TransferJob] = {}

    def submit_store(
        self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: CPULoadStoreSpec
    ) -> bool:
        """Starts to copy blocks to slots."""
        self._running[job_id] = self._transfers.store_groups(self._parts(src_spec, dst_spec))
        return True

    def submit_load(
        self,
        job_id: int,
        src_spec: CPULoadStoreSpec,
        dst_spec: GPULoadStoreSpec,
        expedited: bool = False,
    ) -> bool:
        """Starts to copy slots to blocks."""
        parts = self._parts(dst_spec, src_spec)
        self._running[job_id] = self._transfers.load_groups(parts, expedited=expedited)
        return True

    def get_finished(self) -> list[TransferResult]:
        """Transfers that ended since the last call; raises `TransferError` if one failed."""
        ended = [job_id for job_id, job in self._running.items() if job.done()]
        results = []
        for job_id in ended:
            self._wait(job_id)
            job = self._running.pop(job_id)
            results.append(TransferResult(job_id, True, job.bytes, job.seconds))
        return results

    def wait(self, job_ids: set[int]) -> None:
        """Waits for those of the transfers that run; raises `TransferError` if one failed."""
        for job_id in job_ids & self._running.keys():
            self._wait(job_id)

    def shutdown(self) -> None:
        """Waits for all transfers."""
        self._transfers.close()
        self._running.clear()

    def _wait(self, job_id: int) -> None:
        try:
            self._transfers.wait(self._running[job_id])
        except Exception as error:
            raise TransferError(
                f"transfer {job_id} failed, and vLLM can not go on without it: {error}"
            ) from error

    def _parts(self, of_blocks: GPULoadStoreSpec, of_slots: CPULoadStoreSpec) -> list[GroupBlocks]:
        """The blocks and slots of each group that has some."""
        blocks, slots = of_blocks.block_ids, of_slots.block_ids
        parts = []
        for group, (count, index) in enumerate(
            zip(of_blocks.group_sizes, of_blocks.block_indices, strict=True)
        ):
            if not count:
                continue
            # The first chunk may begin in the middle.
            first = index % self._blocks_per_chunk
            chunks = -(-(first + count) // self._blocks_per_chunk)
            parts.append(GroupBlocks(blocks[:count], slots[:chunks], group, first))
            blocks, slots = blocks[count:], slots[chunks:]
        if len(blocks) or len(slots):
            raise TransferError(
                f"{len(blocks)} blocks and {len(slots)} slots are left over of a transfer of "
                f"{of_blocks!r} and {of_slots!r}"
            )
        return parts
