"""Allocation and views: kernels and transfers see the same bytes, in every layout."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.torch.drawn_specs import BLOCKS, Drawn, caches, fill, pages_of, read_page

from kvtier.errors import LayoutError, SharingError
from kvtier.torch import (
    AttentionSpec,
    EncoderOnlySpec,
    FullAttentionSpec,
    KVLayout,
    MambaSpec,
    MLASpec,
    SlidingWindowSpec,
    allocate_kv_cache,
    plan_kv_cache,
)


def spec(
    block: int = 4, heads: int = 2, dim: int = 8, dtype: torch.dtype = torch.float32
) -> FullAttentionSpec:
    return FullAttentionSpec(block, heads, dim, dtype)


@settings(max_examples=300)
@given(caches())
def test_kernels_and_transfers_see_the_same_bytes(drawn: Drawn) -> None:
    cache = drawn.allocate()
    canonical = cache.canonical
    fill(cache, seed=1)
    storages = {tensor.untyped_storage().data_ptr() for tensor in canonical.tensors}
    for views in cache.layer_views.values():
        for view in (views,) if isinstance(views, torch.Tensor) else views:
            assert view.untyped_storage().data_ptr() in storages  # never a copy
    for block in range(BLOCKS):
        through_rows = [
            bytes(read_page(canonical, index, layer, block).view(torch.uint8).tolist())
            for index, group in enumerate(cache.groups)
            for layer in group.specs
        ]
        assert through_rows == pages_of(cache, block)


@settings(max_examples=200)
@given(caches())
def test_the_round_trip_through_rows_is_the_identity(drawn: Drawn) -> None:
    cache = drawn.allocate()
    fill(cache, seed=2)
    before = [pages_of(cache, block) for block in range(BLOCKS)]
    copies = [tensor.clone() for tensor in cache.canonical.tensors]
    for tensor in cache.canonical.tensors:
        tensor.zero_()
    assert not any(map(any, pages_of(cache, 0)))
    for tensor, copy in zip(cache.canonical.tensors, copies, strict=True):
        tensor.copy_(copy)
    assert [pages_of(cache, block) for block in range(BLOCKS)] == before


@settings(max_examples=200)
@given(caches(), st.integers(0, BLOCKS - 1), st.data())
def test_a_block_of_a_group_is_its_own_bytes(drawn: Drawn, block: int, data: st.DataObject) -> None:
    cache = drawn.allocate()
    fill(cache, seed=3)
    group = data.draw(st.integers(0, len(cache.groups) - 1))
    before = [pages_of(cache, other) for other in range(BLOCKS)]
    moved = 0
    for ref in cache.canonical.refs[group]:
        row = cache.canonical.tensors[ref.tensor][block]
        row[ref.offset : ref.offset + ref.nbytes] ^= -1
        moved += ref.nbytes
    first = sum(len(cache.groups[index].specs) for index in range(group))
    layers = list(cache.groups[group].specs.values())
    assert moved == sum(part.nbytes for layer in layers for part in layer.parts)
    after = [pages_of(cache, other) for other in range(BLOCKS)]
    for place, layer in enumerate(layers, first):
        for start, end in layer.part_ranges():
            flipped = bytes(255 - byte for byte in before[block][place][start:end])
            assert after[block][place][start:end] == flipped
    before[block] = after[block]
    assert after == before


@given(caches())
def test_shared_layers_cost_nothing_and_have_the_very_same_tensors(drawn: Drawn) -> None:
    cache = drawn.allocate()
    for group in cache.groups:
        for reader, owner in group.sharing.items():
            assert cache.layer_views[reader] is cache.layer_views[owner]
    alone = Drawn(drawn.specs, {}, drawn.packed).allocate()
    assert cache.nbytes == alone.nbytes
    assert set(cache.layer_views) == set(alone.layer_views) | set(drawn.shared)
    assert [list(group.specs) for group in cache.groups] == [
        list(group.specs) for group in alone.groups
    ]


@given(caches(), st.integers(1, 1 << 14))
def test_memory_is_used_as_far_as_whole_blocks_go(drawn: Drawn, memory: int) -> None:
    one = plan_kv_cache(drawn.specs, num_blocks=1, shared=drawn.shared, packed=drawn.packed).nbytes
    arguments = {"memory_bytes": memory, "shared": drawn.shared, "packed": drawn.packed}
    if memory < one:
        with pytest.raises(LayoutError, match=f"{memory} bytes are not enough.*takes {one}"):
            plan_kv_cache(drawn.specs, **arguments)  # type: ignore[arg-type]
        return
    plan = plan_kv_cache(drawn.specs, **arguments)  # type: ignore[arg-type]
    assert plan.num_blocks == memory // one
    assert plan.nbytes == plan.num_blocks * one <= memory


@pytest.mark.parametrize(
    ("layout", "shape", "strides"),
    [
        (KVLayout.BLOCKS_NHD, (3, 2, 4, 5, 6), (240, 120, 30, 6, 1)),
        (KVLayout.BLOCKS_HND, (3, 2, 4, 5, 6), (240, 120, 6, 24, 1)),
        (KVLayout.KV_FIRST_NHD, (2, 3, 4, 5, 6), (120, 240, 30, 6, 1)),
        (KVLayout.KV_FIRST_HND, (2, 3, 4, 5, 6), (120, 240, 6, 24, 1)),
        (KVLayout.SPLIT_NHD, (2, 3, 4, 5, 6), (360, 120, 30, 6, 1)),
        (KVLayout.SPLIT_HND, (2, 3, 4, 5, 6), (360, 120, 6, 24, 1)),
        (KVLayout.PAIRED_NHD, (3, 4, 5, 2, 6), (240, 60, 12, 6, 1)),
        (KVLayout.PAIRED_HND, (3, 5, 4, 2, 6), (240, 48, 12, 6, 1)),
    ],
)
def test_views_of_attention(
    layout: KVLayout, shape: tuple[int, ...], strides: tuple[int, ...]
) -> None:
    attention = FullAttentionSpec(4, 5, 6, torch.bfloat16, layout, scales=True)
    data, scales = allocate_kv_cache({"a": attention}, 3, "cpu").layer_views["a"]
    assert data.shape == shape
    if layout.is_split:
        assert data.stride() == strides
    else:  # scales lie behind the data of each block
        page = (2 * 4 * 5 * 6 * 2 + 2 * 4 * 5 * 4) // 2
        assert data.stride() == tuple(page if step == 240 else step for step in strides)
    assert scales.shape == shape[:-1]
    assert scales.dtype == torch.float32


def test_views_of_other_layers() -> None:
    specs = {
        "latent": MLASpec(8, 6, torch.bfloat16, rows_per_block=2),
        "states": MambaSpec(16, ((3, 4), (5,)), (torch.float32, torch.bfloat16)),
    }
    cache = allocate_kv_cache(specs, 7, "cpu")
    latent, states = cache.view("latent"), cache.layer_views["states"]
    assert latent.shape == (7, 2, 6)
    assert [(state.shape, state.dtype) for state in states] == [
        ((7, 3, 4), torch.float32),
        ((7, 5), torch.bfloat16),
    ]
    # One storage; its stride is the larger page, 58 bytes rounded up to whole floats.
    assert [states[0].stride(0), states[1].stride(0), latent.stride(0)] == [15, 30, 30]
    assert [group.page_bytes for group in cache.groups] == [24, 58]


def test_a_layer_with_several_tensors_has_no_single_view() -> None:
    attention = FullAttentionSpec(4, 5, 6, torch.int8, scales=True)
    with pytest.raises(LayoutError, match="'a' has 2 tensors: see layer_views"):
        allocate_kv_cache({"a": attention}, 3, "cpu").view("a")


def test_hybrid_models_are_dealt_into_groups_of_one_width() -> None:
    full, window = spec(), SlidingWindowSpec(4, 2, 8, torch.float32, window=3)
    specs = {f"layer{i}": window if i % 3 else full for i in range(12)}
    cache = allocate_kv_cache(specs, 2, "cpu", shared={"reader": "layer1"})
    assert [len(group.specs) for group in cache.groups] == [4, 4, 4]
    assert [list(group.sharing) for group in cache.groups] == [[], ["reader"], []]
    assert len(cache.canonical.tensors) == 4  # aliased storage appears once
    assert cache.nbytes == 2 * 4 * full.page_bytes
    nearly = {f"layer{i}": window if i < 5 else full for i in range(9)}
    plan = plan_kv_cache(nearly, num_blocks=1)
    assert [len(group.specs) for group in plan.groups] == [5, 4]


def test_kernel_blocks_are_views_of_the_same_bytes() -> None:
    for layout in KVLayout:
        attention = FullAttentionSpec(8, 2, 4, torch.bfloat16, layout)
        cache = allocate_kv_cache({"a": attention}, 3, "cpu", kernel_block_sizes=[2])
        view = cache.view("a")
        assert sorted(view.shape) == [2, 2, 2, 4, 12]
        assert cache.groups[0].blocks_per_kv_block == 4
        fill(cache, seed=4)
        at = [axis.value for axis in layout.view].index("B")
        memory = [axis.value for axis in layout.memory if axis.value != "B"]
        named = [axis.value for axis in layout.view if axis.value != "B"]
        for block in range(3):
            page = b"".join(
                bytes(
                    view.select(at, 4 * block + kernel)
                    .permute([named.index(axis) for axis in memory])
                    .contiguous()
                    .view(-1)
                    .view(torch.uint8)
                    .tolist()
                )
                for kernel in range(4)
            )
            assert (
                bytes(read_page(cache.canonical, 0, "a", block).view(torch.uint8).tolist()) == page
            )


def test_what_does_not_fit_together_is_refused() -> None:
    with pytest.raises(LayoutError, match="one layer that keeps something"):
        allocate_kv_cache({}, 1, "cpu")
    with pytest.raises(LayoutError, match="one layer that keeps something"):
        allocate_kv_cache({"a": EncoderOnlySpec()}, 1, "cpu")
    with pytest.raises(LayoutError, match="num_blocks is 0"):
        allocate_kv_cache({"a": spec()}, 0, "cpu")
    with pytest.raises(LayoutError, match="either num_blocks or memory_bytes"):
        plan_kv_cache({"a": spec()})
    split = FullAttentionSpec(4, 2, 8, torch.float32, KVLayout.SPLIT_NHD)
    with pytest.raises(LayoutError, match=r"SPLIT_NHD keeps keys and values apart.*packed"):
        allocate_kv_cache({"a": split}, 1, "cpu", packed=True)
    with pytest.raises(LayoutError, match="2 groups lie over each other"):
        allocate_kv_cache({"a": split, "b": spec(8)}, 1, "cpu")


@pytest.mark.parametrize(
    ("specs", "shared", "complaint"),
    [
        ({"a": spec(), "b": spec(heads=1)}, {"b": "a"}, "specs differ.*; b -> a$"),
        ({"a": spec(), "b": EncoderOnlySpec()}, {"c": "b"}, "'b' keeps no.*: c -> b$"),
        ({"a": spec()}, {"c": "b", "b": "z"}, "'z' does not exist.*: c -> b -> z$"),
        ({"a": spec()}, {"c": "b", "b": "c"}, "cycle: c -> b -> c$"),
        ({"a": spec()}, {"b": "b"}, "cycle: b -> b$"),
    ],
)
def test_sharing_that_can_not_be_prints_the_chain(
    specs: dict[str, AttentionSpec], shared: dict[str, str], complaint: str
) -> None:
    with pytest.raises(SharingError, match=complaint):
        allocate_kv_cache(specs, 1, "cpu", shared=shared)


def test_specs_that_can_not_be_are_refused() -> None:
    with pytest.raises(LayoutError, match="num_kv_heads is 0"):
        spec(heads=0)
    with pytest.raises(LayoutError, match="dtype is 'float32'"):
        spec(dtype="float32")  # type: ignore[arg-type]
    with pytest.raises(LayoutError, match=r"dtype is torch.int64.*float8_e4m3fn"):
        spec(dtype=torch.int64)
    with pytest.raises(LayoutError, match="layout is 'NHD'"):
        FullAttentionSpec(4, 2, 8, torch.float32, "NHD")  # type: ignore[arg-type]
    with pytest.raises(LayoutError, match="window is 0"):
        SlidingWindowSpec(4, 2, 8, torch.float32, window=0)
    with pytest.raises(LayoutError, match=r"total_kv_heads is 3.*multiple of the 2"):
        FullAttentionSpec(4, 2, 8, torch.float32, total_kv_heads=3)
    with pytest.raises(LayoutError, match=r"padded_page_bytes is 511.*multiple of 4 and 512"):
        FullAttentionSpec(4, 2, 8, torch.float32, padded_page_bytes=511)
    with pytest.raises(LayoutError, match="can not be padded; use KV_FIRST_NHD"):
        FullAttentionSpec(4, 2, 8, torch.float32, KVLayout.SPLIT_NHD, padded_page_bytes=1024)
    with pytest.raises(LayoutError, match="rows_per_block is 3, but must divide"):
        MLASpec(4, 8, torch.float32, rows_per_block=3)
    with pytest.raises(LayoutError, match="1 shapes and 2 dtypes"):
        MambaSpec(4, ((2,),), (torch.float32, torch.float32))
    with pytest.raises(LayoutError, match=r"shape \(0,\)"):
        MambaSpec(4, ((0,),), (torch.float32,))
