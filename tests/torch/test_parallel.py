"""Parallel-agnostic chunks: what ranks of one size stored, ranks of another size load."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.torch.drawn_specs import fill, read_page

from kvtier import Region
from kvtier.torch import (
    FullAttentionSpec,
    KVCache,
    KVLayout,
    LayerSpec,
    MambaSpec,
    MLASpec,
    SlidingWindowSpec,
    TensorParallel,
    TransferEngine,
    TransferJob,
    allocate_kv_cache,
    layout_identity,
    region_tensor,
)

BLOCKS, PER_CHUNK, HEADS = 6, 2, 4


def model(size: int, layout: KVLayout, *, hybrid: bool) -> dict[str, LayerSpec]:
    """The specs of one rank of a model with 4 KV heads; 8 ranks hold each head twice."""
    shards = min(size, HEADS)
    heads = HEADS // shards
    specs: dict[str, LayerSpec] = {
        "a": FullAttentionSpec(4, heads, 3, torch.bfloat16, layout, True, None, HEADS),
        "b": FullAttentionSpec(4, heads, 2, torch.int8, layout, total_kv_heads=HEADS),
    }
    if hybrid:
        specs["m"] = MambaSpec(
            8,
            ((8 // shards, 3), (4 // shards,)),
            (torch.float32, torch.bfloat16),
            shards=shards,
        )
        specs["l"] = MLASpec(4, 5, torch.bfloat16)
        specs["w"] = SlidingWindowSpec(4, 1, 3, torch.float16, layout, window=5)
    return specs


def part_views(cache: KVCache, layer: str) -> tuple[torch.Tensor, ...]:
    views = cache.layer_views[layer]
    return (views,) if isinstance(views, torch.Tensor) else views


def slice_of(whole: KVCache, rank: KVCache, layer: str, parallel: TensorParallel) -> None:
    """Gives the rank its part of the whole model's layer, by way of the views."""
    group = next(group for group in whole.groups if layer in group.specs)
    own = next(group for group in rank.groups if layer in group.specs)
    parts = zip(group.specs[layer].parts, own.specs[layer].parts, strict=True)
    for (full, part), source, target in zip(
        parts, part_views(whole, layer), part_views(rank, layer), strict=True
    ):
        assert full.shards == 1 or full.shards == part.shards
        if part.shards > 1:
            axes = full.memory if full.shape is not None else full.view
            at = [axis.name for axis in axes].index("HEAD")
            shard = parallel.rank // (parallel.size // part.shards)
            source = source.chunk(part.shards, at)[shard]
        target.copy_(source)


def rank_caches(size: int, layout: KVLayout, *, hybrid: bool) -> list[KVCache]:
    specs = model(size, layout, hybrid=hybrid)
    return [allocate_kv_cache(specs, BLOCKS, "cpu") for _ in range(size)]


def transfer(
    verb: str, ranks: list[KVCache], region: Region, group: int, ids: list[int], slots: list[int]
) -> list[TransferJob]:
    jobs = []
    for rank, cache in enumerate(ranks):
        parallel = TensorParallel(len(ranks), rank)
        with TransferEngine(region, cache, PER_CHUNK, tensor_parallel=parallel) as engine:
            jobs.append(getattr(engine, verb)(ids, slots, group=group, first=1))
    return jobs


@settings(max_examples=60)
@given(
    st.sampled_from([1, 2, 4, 8]),
    st.sampled_from([1, 2, 4, 8]),
    st.sampled_from(list(KVLayout)),
    st.booleans(),
    st.data(),
)
def test_a_store_of_some_ranks_serves_any_other_number(
    writers: int, readers: int, layout: KVLayout, hybrid: bool, data: st.DataObject
) -> None:
    hybrid = hybrid and not layout.is_split
    whole = rank_caches(1, layout, hybrid=hybrid)[0]
    stored_by = rank_caches(writers, layout, hybrid=hybrid)
    loaded_by = rank_caches(readers, layout, hybrid=hybrid)
    region = Region(3, PER_CHUNK * whole.page_bytes)
    group = data.draw(st.integers(0, len(whole.groups) - 1))
    fill(whole, 1)
    for rank, cache in enumerate(stored_by):
        for layer in whole.groups[group].specs:
            slice_of(whole, cache, layer, TensorParallel(writers, rank))
    ids = data.draw(st.permutations(range(BLOCKS)))[:4]
    slots = data.draw(st.permutations(range(3)))

    jobs = transfer("store", stored_by, region, group, ids, slots)
    specs = whole.groups[group].specs.values()
    assert sum(job.bytes for job in jobs) == 4 * sum(
        part.nbytes for spec in specs for part in spec.parts
    )  # every byte once, whoever holds it
    transfer("load", loaded_by, region, group, ids, slots)

    expected = rank_caches(readers, layout, hybrid=hybrid)
    for rank, (cache, wanted) in enumerate(zip(loaded_by, expected, strict=True)):
        for layer in whole.groups[group].specs:
            slice_of(whole, wanted, layer, TensorParallel(readers, rank))
        for block in ids:
            for layer in whole.groups[group].specs:
                got = read_page(cache.canonical, group, layer, block)
                assert torch.equal(got, read_page(wanted.canonical, group, layer, block))


def test_one_rank_stores_the_very_bytes_of_a_cache_that_is_not_split() -> None:
    specs = model(1, KVLayout.KV_FIRST_NHD, hybrid=True)
    cache = allocate_kv_cache(specs, BLOCKS, "cpu")
    fill(cache, 2)
    regions = [Region(2, PER_CHUNK * cache.page_bytes) for _ in range(2)]
    for region, parallel in zip(regions, (None, TensorParallel(1, 0)), strict=True):
        with TransferEngine(region, cache, PER_CHUNK, tensor_parallel=parallel) as engine:
            engine.store([5, 1, 2, 0], [1, 0])
    assert torch.equal(*map(region_tensor, regions))


def test_ranks_with_the_same_bytes_take_turns() -> None:
    ranks = [allocate_kv_cache({"l": MLASpec(4, 5, torch.bfloat16)}, BLOCKS, "cpu")] * 3
    region = Region(3, PER_CHUNK * ranks[0].page_bytes)
    jobs = transfer("store", ranks, region, 0, [0, 1, 2, 3], [0, 1, 2])
    assert [job.bytes // ranks[0].page_bytes for job in jobs] == [1, 2, 1]


@pytest.mark.parametrize("layout", list(KVLayout))
def test_the_identity_is_that_of_the_bytes(layout: KVLayout) -> None:
    def identity(size: int, *, agnostic: bool, rank: int = 0) -> dict[str, object]:
        groups = rank_caches(size, layout, hybrid=False)[0].groups
        return layout_identity(groups, 2, TensorParallel(size, rank), agnostic=agnostic)

    assert identity(1, agnostic=True) == identity(2, agnostic=True) == identity(8, agnostic=True)
    assert identity(1, agnostic=False) != identity(2, agnostic=False)
    assert identity(2, agnostic=False) != identity(2, agnostic=False, rank=1)
    assert identity(1, agnostic=False) != identity(1, agnostic=True)
    groups = allocate_kv_cache(model(1, layout, hybrid=False), 1, "cpu").groups
    assert layout_identity(groups, 2) != layout_identity(groups, 4)


def test_the_identity_does_not_name_the_arrangement_in_memory_but_the_order_of_a_page() -> None:
    def identity(
        layout: KVLayout, kernel_block: int = 4, *, packed: bool = False
    ) -> dict[str, object]:
        spec = FullAttentionSpec(4, 2, 8, torch.bfloat16, layout)
        cache = allocate_kv_cache(
            {"a": spec}, 2, "cpu", kernel_block_sizes=[kernel_block], packed=packed
        )
        return layout_identity(cache.groups, 1)

    nhd = identity(KVLayout.KV_FIRST_NHD)
    assert nhd == identity(KVLayout.SPLIT_NHD) == identity(KVLayout.BLOCKS_NHD)
    assert nhd == identity(KVLayout.BLOCKS_NHD, packed=True)
    assert nhd != identity(KVLayout.BLOCKS_HND)
    assert nhd != identity(KVLayout.BLOCKS_NHD, kernel_block=2)
