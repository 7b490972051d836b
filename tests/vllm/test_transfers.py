"""Bytes between KV cache and slots: every layout, chunks that begin and end in the middle."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.vllm.conftest import quiet_imports

import kvtier
from kvtier.errors import ConfigError, LayoutError, TransferError
from kvtier.torch.host_lanes import HostLanes
from kvtier.torch.ordering import Lane

with quiet_imports():
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import (
        OffloadingConnectorMetadata,
        TransferJob,
    )
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.worker import (
        OffloadingConnectorWorker,
    )
    from vllm.v1.kv_offload.base import (
        CanonicalKVCacheRef,
        CanonicalKVCaches,
        CanonicalKVCacheTensor,
        CanonicalPageMapping,
        CopyRun,
        GPULoadStoreSpec,
    )
    from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec

    from kvtier.integrations.vllm.layout import rank_layout, slot_layout
    from kvtier.integrations.vllm.worker import KVTierOffloadingWorker

BLOCKS = 12
SLOTS = 6


def config(
    block_bytes: int,
    blocks_per_chunk: int,
    *,
    rank: int = 0,
    ranks: int = 1,
    replicated: bool = False,
    canonical: bool = False,
) -> Any:
    """What is asked of vLLM's `OffloadingConfig`."""
    return SimpleNamespace(
        worker_kv_bytes_per_block=block_bytes,
        cache=SimpleNamespace(blocks_per_chunk=blocks_per_chunk),
        parallel=SimpleNamespace(rank=rank, world_size=ranks, is_parallelism_agnostic=canonical),
        replicated_layout=replicated,
        canonical_layout=canonical,
    )


class Rank:
    """A worker of its own over random KV caches; `pages` are bytes of a page with its padding."""

    def __init__(
        self,
        of: Any,
        region: kvtier.Region | None,
        pages: list[tuple[int, int]],
        groups: list[list[int]],
        mapping: CanonicalPageMapping | None = None,
        stride: int = 0,
    ) -> None:
        self.region = region or kvtier.Region(SLOTS, slot_layout(of, 1 << 20).slot_bytes)
        rng = np.random.default_rng(of.parallel.rank)
        self.tensors = []
        for _, padded in pages:
            raw = rng.integers(-128, 128, (BLOCKS, padded + stride), dtype=np.int8)
            self.tensors.append(torch.from_numpy(raw)[:, :padded])
        caches = CanonicalKVCaches(
            [
                CanonicalKVCacheTensor(tensor, padded)
                for tensor, (_, padded) in zip(self.tensors, pages, strict=True)
            ],
            [
                [CanonicalKVCacheRef(index, pages[index][0], mapping) for index in group]
                for group in groups
            ],
        )
        per_chunk = of.cache.blocks_per_chunk
        self.worker = KVTierOffloadingWorker(self.region, rank_layout(of, caches), per_chunk)
        self.jobs = 0

    def move(self, blocks: list[list[int]], firsts: list[int], slots: list[int], verb: str) -> int:
        """Runs one transfer; returns its bytes."""
        self.jobs += 1
        of_blocks = GPULoadStoreSpec(
            [block for group in blocks for block in group],
            group_sizes=[len(group) for group in blocks],
            block_indices=firsts,
        )
        of_slots = CPULoadStoreSpec(slots)
        if verb == "store":
            assert self.worker.submit_store(self.jobs, of_blocks, of_slots)
        else:
            assert self.worker.submit_load(self.jobs, of_slots, of_blocks)
        self.worker.wait({self.jobs})
        [result] = self.worker.get_finished()
        assert (result.job_id, result.success) == (self.jobs, True)
        assert result.transfer_time is not None
        size = result.transfer_size
        assert size is not None
        return int(size)


def chunks(blocks: int, first: int, blocks_per_chunk: int) -> int:
    return -(-(first % blocks_per_chunk + blocks) // blocks_per_chunk)


@given(data=st.data())
def test_what_is_stored_comes_back(data: st.DataObject) -> None:
    """Two overlaid groups, padded pages, strided rows; chunks cut at both ends; the rest of the
    KV cache stays as it is."""
    blocks_per_chunk = data.draw(st.sampled_from([1, 2, 3, 4]))
    pages = data.draw(st.lists(st.sampled_from([(8, 8), (5, 8), (24, 32)]), min_size=1, max_size=3))
    groups = [[*range(len(pages))], [0]]
    of = config(sum(padded for _, padded in pages), blocks_per_chunk)
    rank = Rank(of, None, pages, groups, stride=data.draw(st.sampled_from([0, 16])))
    firsts = [data.draw(st.integers(0, 7)), data.draw(st.integers(0, 7))]
    ids = data.draw(st.permutations(range(BLOCKS)))
    sizes = [data.draw(st.integers(0, 3)), data.draw(st.integers(0, 3))]
    sources = [ids[: sizes[0]], ids[sizes[0] : sum(sizes)]]
    needed = sum(chunks(size, first, blocks_per_chunk)
                 for size, first in zip(sizes, firsts, strict=True) if size)  # fmt: skip
    slots = data.draw(st.permutations(range(SLOTS)))[:needed]
    size = rank.move(sources, firsts, slots, "store")
    assert size == sizes[0] * sum(page for page, _ in pages) + sizes[1] * pages[0][0]

    # Back into other blocks, at the same places of their chunks.
    targets = data.draw(st.permutations(range(BLOCKS)))
    into = [targets[: sizes[0]], targets[sizes[0] : sum(sizes)]]
    before = [tensor.clone() for tensor in rank.tensors]
    assert rank.move(into, firsts, slots, "load") == size
    expected = [tensor.clone() for tensor in before]
    for group, origin, target in zip(groups, sources, into, strict=True):
        for index in group:
            page = pages[index][0]
            for old, new in zip(origin, target, strict=True):
                expected[index][new, :page] = before[index][old, :page]
    for tensor, wanted in zip(rank.tensors, expected, strict=True):
        assert torch.equal(tensor, wanted)


@pytest.mark.parametrize("replicated", [False, True])
def test_ranks_have_parts_of_a_slot_or_one_together(replicated: bool) -> None:
    """A second rank does not disturb the first; with a replicated layout it reads its bytes."""
    ranks = []
    region = None
    for number in range(2):
        of = config(8, 2, rank=number, ranks=2, replicated=replicated)
        ranks.append(Rank(of, region, [(8, 8)], [[0]]))
        region = ranks[0].region
    first, second = ranks
    first.move([[0, 1]], [0], [3], "store")
    if not replicated:
        second.move([[0, 1]], [0], [3], "store")
    source = first if replicated else second
    second.move([[4, 5]], [0], [3], "load")
    assert torch.equal(second.tensors[0][4:6], source.tensors[0][0:2])
    first.move([[4, 5]], [0], [3], "load")
    assert torch.equal(first.tensors[0][4:6], first.tensors[0][0:2])


def test_canonical_pages_do_not_depend_on_the_ranks() -> None:
    """Two ranks with half of the heads each write what one with all of them reads."""

    def mapping(rank: int, ranks: int) -> CanonicalPageMapping:
        # Four tokens of two heads of four bytes: a rank has its heads of every token.
        heads = 2 // ranks
        run = CopyRun(0, rank * 4, 4 * heads, 4, 4 * heads, 8)
        return CanonicalPageMapping(32, 16 * heads, (run,), 1, 0, True)

    halves = []
    region = None
    for number in range(2):
        of = config(16, 2, rank=number, ranks=2, canonical=True)
        halves.append(Rank(of, region, [(16, 16)], [[0]], mapping(number, 2)))
        region = halves[0].region
    for half in halves:
        assert half.move([[2, 3]], [0], [1], "store") == 32
    whole = Rank(config(32, 2, canonical=True), region, [(32, 32)], [[0]], mapping(0, 1))
    whole.move([[0, 1]], [0], [1], "load")
    heads = [half.tensors[0][2:4].reshape(2, 4, 4) for half in halves]
    assert torch.equal(whole.tensors[0][0:2].reshape(2, 4, 8), torch.cat(heads, dim=2))


def test_ranks_with_the_same_bytes_take_turns() -> None:
    """Each writes every second place of the region, and all of it is there."""
    run = CopyRun(0, 0, 8, 1, 8, 8)
    region = None
    ranks = []
    for number in range(2):
        mapping = CanonicalPageMapping(8, 8, (run,), 2, number, True)
        of = config(8, 2, rank=number, ranks=2, canonical=True)
        ranks.append(Rank(of, region, [(8, 8)], [[0]], mapping))
        region = ranks[0].region
        # Ranks with the same heads have the same bytes.
        ranks[-1].tensors[0].copy_(ranks[0].tensors[0])
    sizes = [rank.move([[0, 1, 2]], [1], [2, 4], "store") for rank in ranks]
    assert sizes == [8, 16]
    ranks[0].move([[6, 7, 8]], [1], [2, 4], "load")
    assert torch.equal(ranks[0].tensors[0][6:9], ranks[0].tensors[0][0:3])


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(LayoutError, match="16 bytes a block, but vLLM's config makes room for"):
        Rank(config(8, 1024), None, [(16, 16)], [[0]])
    with pytest.raises(LayoutError, match="take canonical_layout out"):
        Rank(config(8, 1, canonical=True), None, [(8, 8)], [[0]])
    with pytest.raises(ConfigError, match="cpu_bytes_to_use is 4095, but one chunk"):
        slot_layout(config(8, 1), 4095)
    rank = Rank(config(8, 2), None, [(8, 8)], [[0]])
    with pytest.raises(TransferError, match=r"block 99 .* does not exist"):
        rank.move([[0, 99]], [0], [0], "store")
    with pytest.raises(TransferError, match="1 slots are left over"):
        rank.move([[0, 1]], [0], [0, 1], "store")


def test_layers_that_share_a_kv_cache_move_it_once() -> None:
    rank = Rank(config(8, 1), None, [(8, 8)], [[0, 0]])
    assert rank.move([[2, 5]], [0], [1, 0], "store") == 16
    rank.move([[0, 1]], [0], [1, 0], "load")
    assert torch.equal(rank.tensors[0][0:2], rank.tensors[0][[2, 5]])


def test_a_shared_store_gets_no_bytes_that_depend_on_the_ranks() -> None:
    """vLLM promised portable bytes for the namespace, but a layer's mapping does not have them."""
    own = CanonicalPageMapping(8, 8, (CopyRun(0, 0, 8, 1, 8, 8),), 1, 0, False)
    with pytest.raises(LayoutError, match="can not certify this KV cache"):
        Rank(config(8, 1, canonical=True), None, [(8, 8)], [[0]], own)


def test_an_expedited_load_does_not_queue_behind_others() -> None:
    """Somebody waits for it within the step."""
    rank = Rank(config(8, 1), None, [(8, 8)], [[0]])
    rank.move([[0, 1]], [0], [0, 1], "store")
    lanes = rank.worker._transfers.lanes
    assert isinstance(lanes, HostLanes)
    gate = threading.Event()
    lanes._workers[Lane.LOAD].submit(gate.wait)
    worker = rank.worker
    worker.submit_load(10, CPULoadStoreSpec([0]), GPULoadStoreSpec([4], [1], [0]))
    worker.submit_load(11, CPULoadStoreSpec([1]), GPULoadStoreSpec([5], [1], [0]), expedited=True)
    worker.wait({11})
    assert [result.job_id for result in worker.get_finished()] == [11]
    assert torch.equal(rank.tensors[0][5], rank.tensors[0][1])
    gate.set()
    worker.wait({10})
    assert [result.job_id for result in worker.get_finished()] == [10]
    assert torch.equal(rank.tensors[0][4], rank.tensors[0][0])


@pytest.mark.parametrize("tells", ["wait", "get_finished"])
def test_a_transfer_that_fails_says_why(tells: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM would only assert; nothing may pass it off as done."""
    rank = Rank(config(8, 1), None, [(8, 8)], [[0]])

    def broken(*_: Any) -> float:
        raise RuntimeError("the bus is on fire")

    monkeypatch.setattr(rank.worker._transfers.lanes, "_run", broken)
    rank.worker.submit_store(7, GPULoadStoreSpec([0], [1], [0]), CPULoadStoreSpec([0]))
    assert rank.worker._running[7].error is not None  # it has ended
    with pytest.raises(TransferError, match=r"transfer 7 failed, .* the bus is on fire"):
        rank.worker.wait({7}) if tells == "wait" else rank.worker.get_finished()


def in_vllm(rank: Rank) -> Any:
    """vLLM's side of a worker, over ours."""
    of = SimpleNamespace(canonical_layout=False, parallel=SimpleNamespace(rank=0))
    spec: Any = SimpleNamespace(replicated_layout=False, config=of)
    nothing: Any = None
    connector = OffloadingConnectorWorker(spec, nothing, nothing)
    connector.worker = rank.worker
    return connector


def job(blocks: list[int], slots: list[int], *, load: bool, **options: Any) -> TransferJob:
    of_blocks = GPULoadStoreSpec(blocks, [len(blocks)], [0])
    ends = (CPULoadStoreSpec(slots), of_blocks) if load else (of_blocks, CPULoadStoreSpec(slots))
    return TransferJob("request", *ends, **options)


def test_vllm_drives_it_as_it_drives_its_own() -> None:
    """A store that is put off a step and flushed when its blocks are taken; then a load."""
    rank = Rank(config(8, 1), None, [(8, 8)], [[0]])
    connector = in_vllm(rank)
    before = rank.tensors[0].clone()
    connector.prepare_store_kv(
        OffloadingConnectorMetadata({}, {1: job([2, 5], [0, 3], load=False)})
    )
    assert connector.build_connector_worker_meta() is None
    connector.handle_preemptions(OffloadingConnectorMetadata({}, {}, jobs_to_flush={1}))
    rank.tensors[0][:] = 0
    assert connector.get_finished(set()) == (set(), set())
    assert connector.build_connector_worker_meta().completed_jobs == {1: 1}
    connector.start_kv_transfers(
        OffloadingConnectorMetadata({2: job([7, 1], [0, 3], load=True)}, {})
    )
    rank.worker.wait({2})
    assert connector.get_finished(set()) == (set(), {"request"})
    assert torch.equal(rank.tensors[0][[7, 1]], before[[2, 5]])


@pytest.mark.skipif("sync" not in TransferJob.__dataclass_fields__, reason="0.33 began with it")
def test_a_load_within_the_step_is_there_when_the_step_begins() -> None:
    rank = Rank(config(8, 1), None, [(8, 8)], [[0]])
    rank.move([[2]], [0], [4], "store")
    connector = in_vllm(rank)
    connector.start_kv_transfers(
        OffloadingConnectorMetadata({2: job([7], [4], load=True, sync=True)}, {})
    )
    assert torch.equal(rank.tensors[0][7], rank.tensors[0][2])
    # Nobody waits to be told: its request runs already.
    assert connector.get_finished(set()) == (set(), set())
