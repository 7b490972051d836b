"""Groups: who shares a block table, and which blocks can be split."""

import pytest
import torch

from kvtier.errors import LayoutError, SharingError
from kvtier.torch import (
    EncoderOnlySpec,
    FullAttentionSpec,
    LayerSpec,
    MambaSpec,
    MLASpec,
    MultipleOf,
    SlidingWindowSpec,
    kernel_block_size,
    make_groups,
    plan_kv_cache,
)

FULL = FullAttentionSpec(8, 2, 4, torch.bfloat16)
WINDOW = SlidingWindowSpec(8, 2, 4, torch.bfloat16, window=5)


def test_layers_that_share_join_their_owners_group() -> None:
    specs = {"a": FULL, "w": WINDOW, "e": EncoderOnlySpec()}
    shared = {"reader": "middle", "middle": "w"}
    for layers in ([["a"], ["w"]], [["a"], ["w", "reader", "middle"]], [["a"], ["reader", "w"]]):
        full, window = make_groups(layers, specs, shared)
        assert full.layers == ("a",)
        assert window.layers == ("w", "reader", "middle")
        assert window.sharing == {"reader": "w", "middle": "w"}
        assert window.page_bytes == WINDOW.page_bytes


def test_one_kind_with_pages_of_different_sizes_is_one_group() -> None:
    wide = FullAttentionSpec(8, 6, 4, torch.float32)
    plan = plan_kv_cache({"a": FULL, "b": wide}, num_blocks=3)
    assert [list(group.specs) for group in plan.groups] == [["a", "b"]]
    assert plan.storage_bytes == (3 * FULL.page_bytes, 3 * wide.page_bytes)


@pytest.mark.parametrize(
    ("layers", "shared", "complaint"),
    [
        ([["a", "r"], ["w"]], {"r": "w"}, "'r' is in group 0, but the owner.*in 1: r -> w$"),
        ([["a", "r"], ["w"]], {"r": "s", "s": "w"}, "'r' is in group 0.*: r -> s -> w$"),
    ],
)
def test_sharing_across_groups_prints_the_chain(
    layers: list[list[str]], shared: dict[str, str], complaint: str
) -> None:
    with pytest.raises(SharingError, match=complaint):
        make_groups(layers, {"a": FULL, "w": WINDOW}, shared)


@pytest.mark.parametrize(
    ("layers", "complaint"),
    [
        ([["a", "w"]], "'a' and 'w' can not share a block table"),
        ([["a"]], "layers in no group: w$"),
        ([["a"], ["w", "a"]], "'a' is in group 0 and in 1"),
        ([["a"], ["w", "z"]], "'z' of group 1 has no KV cache"),
        ([["a"], ["w", "e"]], "'e' of group 1 has no KV cache"),
        ([["a"], ["w"], []], "group 2 has no layer that owns"),
    ],
)
def test_groups_that_can_not_be_are_refused(layers: list[list[str]], complaint: str) -> None:
    with pytest.raises(LayoutError, match=complaint):
        make_groups(layers, {"a": FULL, "w": WINDOW, "e": EncoderOnlySpec()})


@pytest.mark.parametrize(
    ("spec", "size", "complaint"),
    [
        (MLASpec(8, 4, torch.bfloat16, rows_per_block=2), 2, "stores 2 rows for the 8 tokens"),
        (MambaSpec(8, ((4,),), (torch.bfloat16,)), 2, "a state covers the whole block"),
        (
            FullAttentionSpec(8, 2, 4, torch.bfloat16, padded_page_bytes=512),
            2,
            "its pages are padded",
        ),
        (
            FullAttentionSpec(8, 1, 3, torch.int8, scales=True),
            1,
            "its parts would be aligned differently",
        ),
    ],
)
def test_blocks_that_can_not_be_split_are_refused(
    spec: LayerSpec, size: int, complaint: str
) -> None:
    with pytest.raises(LayoutError, match=f"layer 'a' can not be split.*{complaint}.*= {size}"):
        make_groups([["a"]], {"a": spec}, kernel_block_sizes=[size])
    assert make_groups([["a"]], {"a": spec}, kernel_block_sizes=[8])[0].blocks_per_kv_block == 1


def test_kernel_blocks_divide_blocks_and_need_dense_pages() -> None:
    for size in (3, 0, 16):
        with pytest.raises(LayoutError, match=f"kernel blocks of {size} tokens do not divide"):
            make_groups([["a"]], {"a": FULL}, kernel_block_sizes=[size])
    with pytest.raises(LayoutError, match="2 kernel block sizes for 1 groups"):
        make_groups([["a"]], {"a": FULL}, kernel_block_sizes=[8, 8])
    with pytest.raises(LayoutError, match="can not be split into kernel blocks of 4 tokens"):
        plan_kv_cache({"a": FULL, "b": FULL}, num_blocks=1, packed=True, kernel_block_sizes=[4])
    mla = MLASpec(8, 4, torch.bfloat16)
    plan = plan_kv_cache({"a": mla}, num_blocks=1, kernel_block_sizes=[4])
    assert plan.groups[0].kernel_spec("a").page_bytes == mla.page_bytes // 2


@pytest.mark.parametrize(
    ("block_size", "backends", "size"),
    [
        (128, {"a": [16, 32, 64]}, 64),
        (128, {"a": [16, 32, 64], "b": [32]}, 32),
        (128, {"a": [MultipleOf(16)]}, 128),
        (128, {"a": [MultipleOf(16)], "b": [16, 32]}, 32),
        (96, {"a": [64, 16], "b": [MultipleOf(8)]}, 16),
        (96, {"a": [MultipleOf(32)], "b": [32, 48]}, 32),
    ],
)
def test_kernel_blocks_are_the_largest_that_all_backends_support(
    block_size: int, backends: dict[str, list[int | MultipleOf]], size: int
) -> None:
    specs = {"a": FullAttentionSpec(block_size, 1, 2, torch.bfloat16)}
    assert kernel_block_size(specs, backends) == size


def test_backends_without_a_common_size_are_named() -> None:
    specs = {"a": FullAttentionSpec(128, 1, 2, torch.bfloat16)}
    with pytest.raises(LayoutError, match=r"\(flash: 48; other: multiples of 16\)"):
        kernel_block_size(specs, {"flash": [48], "other": [MultipleOf(16)]})
    latent = {"a": MLASpec(128, 4, torch.bfloat16, rows_per_block=32)}
    assert kernel_block_size(latent, {"mla": [MultipleOf(64)]}) == 128
    with pytest.raises(LayoutError, match=r"'a' can not be split.*64.*stores 32 rows for the 128"):
        kernel_block_size(latent, {"mla": [64]})
