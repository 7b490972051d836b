"""Registering the tensors of an engine: any arrangement in memory, or a refusal that says why."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.torch.drawn_specs import read_page

from kvtier.errors import LayoutError, SharingError
from kvtier.torch import (
    CanonicalKVCaches,
    FullAttentionSpec,
    KVLayout,
    MambaSpec,
    make_groups,
    register_kv_caches,
)
from kvtier.torch.canonical import Registered

BLOCKS = 4
SPEC = FullAttentionSpec(2, 3, 4, torch.bfloat16, KVLayout.BLOCKS_NHD)
SHAPE = (BLOCKS, 2, 2, 3, 4)
PAGE = SPEC.page_bytes // 2  # in elements


def register(**tensors: Registered) -> CanonicalKVCaches:
    groups = make_groups([["a", "b"]], {"a": SPEC, "b": SPEC})
    return register_kv_caches(groups, BLOCKS, tensors)


def storage(elements: int = 4 * BLOCKS * PAGE) -> torch.Tensor:
    return torch.arange(elements).to(torch.bfloat16)


def strided(memory: torch.Tensor, offset: int, block_stride: int) -> torch.Tensor:
    return memory.as_strided(SHAPE, (block_stride, 24, 12, 4, 1), offset)


def page(tensor: torch.Tensor, block: int) -> torch.Tensor:
    return tensor[block].contiguous().view(-1).view(torch.int8)


@pytest.mark.parametrize(
    ("place_a", "place_b", "tensors"),
    [
        ((0, PAGE), (BLOCKS * PAGE, PAGE), 2),  # one behind the other
        ((5, PAGE), (7 + BLOCKS * PAGE, PAGE), 2),  # at an offset
        ((3, PAGE + 9), (200 + BLOCKS * PAGE, PAGE + 8), 2),  # padded pages
        ((0, 2 * PAGE), (PAGE, 2 * PAGE), 1),  # packed blocks
        ((PAGE, 3 * PAGE), (0, 3 * PAGE), 1),  # packed, in another order, with a stranger
        ((11, 3 * PAGE), (PAGE + 12, 3 * PAGE), 1),  # packed at an offset, with a gap
    ],
)
def test_any_arrangement_in_memory_is_rows(
    place_a: tuple[int, int], place_b: tuple[int, int], tensors: int
) -> None:
    memory = storage()
    a, b = (strided(memory, *place) for place in (place_a, place_b))
    caches = register(a=a, b=b)
    assert len(caches.tensors) == tensors
    for tensor in caches.tensors:
        assert tensor.dtype == torch.int8
        assert tensor.shape[0] == BLOCKS
        assert tensor.untyped_storage().data_ptr() == memory.untyped_storage().data_ptr()
    for block in range(BLOCKS):
        assert torch.equal(read_page(caches, 0, "a", block), page(a, block))
        assert torch.equal(read_page(caches, 0, "b", block), page(b, block))


@settings(max_examples=200)
@given(st.data())
def test_strides_of_any_size_round_trip(data: st.DataObject) -> None:
    """Padding anywhere: between heads, tokens, halves and blocks; in any order of K/V and block."""
    layout = data.draw(st.sampled_from(list(KVLayout)))
    spec = FullAttentionSpec(2, 3, 4, torch.int8, layout)
    sizes = {axis: spec.parts[0].sizes.get(axis, BLOCKS) for axis in layout.view}
    strides, step = {}, 1
    for axis in reversed(layout.memory):
        strides[axis] = step
        gap = 0 if axis is layout.memory[-1] else data.draw(st.integers(0, 3))
        step = step * sizes[axis] + gap
    memory = torch.randint(-128, 128, (step + 7,), dtype=torch.int8)
    offset = data.draw(st.integers(0, 7))
    view = memory.as_strided(
        [sizes[axis] for axis in layout.view], [strides[axis] for axis in layout.view], offset
    )
    caches = register_kv_caches(make_groups([["a"]], {"a": spec}), BLOCKS, {"a": view})
    at = [axis.name for axis in layout.view].index("BLOCK")
    named = [axis for axis in layout.view if axis.name != "BLOCK"]
    order = [named.index(axis) for axis in spec.parts[0].page_axes]
    for block in range(BLOCKS):
        expected = view.select(at, block).permute(order).contiguous().view(-1)
        assert torch.equal(read_page(caches, 0, "a", block), expected)
    # Through the rows and back: everything that is not a page stays.
    before = memory.clone()
    for ref in caches.refs[0]:
        caches.tensors[ref.tensor][:, ref.offset : ref.offset + ref.nbytes] ^= -1
    assert torch.equal(view, ~before.as_strided(view.shape, view.stride(), offset))
    assert int((memory != before).sum()) == view.numel()


def test_names_are_checked_exactly() -> None:
    tensor = strided(storage(), 0, PAGE)
    with pytest.raises(LayoutError, match=r"missing b; unexpected c, d$"):
        register(a=tensor, c=tensor, d=tensor)
    with pytest.raises(LayoutError, match=r"missing none; unexpected x$"):
        register(a=tensor, b=tensor, x=tensor)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda a: a.to(torch.float16), r"registered torch.float16.*spec says torch.bfloat16"),
        (lambda a: a[:3], r"of shape \(3, 2, 2, 3, 4\), but its spec says.*\(4, 2, 2, 3, 4\)"),
        (lambda a: a.to("meta"), "more than one device: 'a' on meta, 'b' on cpu"),
        (lambda a: a[:1].expand(SHAPE), "elements overlap"),
        (lambda a: a.repeat_interleave(2, -1)[..., ::2], "innermost axis are not contiguous"),
        (lambda a: a.transpose(2, 3).contiguous().transpose(2, 3), "another order than.*2NHD"),
        (lambda a: (a, a), "has 1 parts, but 2 tensors"),
    ],
)
def test_tensors_that_are_not_of_their_spec_are_refused(
    change: Callable[[torch.Tensor], Registered], complaint: str
) -> None:
    memory = storage()
    a, b = strided(memory, 0, PAGE), strided(memory, BLOCKS * PAGE, PAGE)
    with pytest.raises(LayoutError, match=complaint):
        register(a=change(a), b=b)


@pytest.mark.parametrize(
    ("place_b", "complaint"),
    [
        ((0, PAGE), "'a' and 'b' of group 0 lie at the same memory.*declare it as shared"),
        ((PAGE, PAGE), "overlap in memory with blocks of different places"),
        ((PAGE, 2 * PAGE), "overlap in memory.* 96 and 192 bytes from block to block"),
    ],
)
def test_memory_that_overlaps_is_refused(place_b: tuple[int, int], complaint: str) -> None:
    memory = storage()
    with pytest.raises(LayoutError, match=complaint):
        register(a=strided(memory, 0, PAGE), b=strided(memory, *place_b))


def test_pages_that_overlap_in_part_are_refused() -> None:
    memory = storage()
    with pytest.raises(LayoutError, match="'a' and 'b' of group 0 lie at the same memory"):
        register(a=strided(memory, 0, 3 * PAGE), b=strided(memory, PAGE // 2, 3 * PAGE))


def test_a_shared_layer_must_have_its_owners_memory() -> None:
    groups = make_groups([["a"]], {"a": SPEC}, {"r": "a"})
    a = strided(storage(), 0, PAGE)
    caches = register_kv_caches(groups, BLOCKS, {"r": a.view(SHAPE), "a": a})
    assert len(caches.tensors) == 1
    assert [ref.layer for ref in caches.refs[0]] == ["a"]  # transferred once
    with pytest.raises(SharingError, match="registered with other memory: r -> a"):
        register_kv_caches(groups, BLOCKS, {"r": a.clone(), "a": a})


def test_groups_may_lie_over_each_other() -> None:
    mamba = MambaSpec(8, ((3,), (2, 5)), (torch.float32, torch.bfloat16))
    groups = make_groups([["a"], ["m"]], {"a": SPEC, "m": mamba})
    memory = torch.zeros(BLOCKS * 96, dtype=torch.int8)
    a = memory.view(torch.bfloat16).view(SHAPE)
    states = (
        memory.view(torch.float32).as_strided((BLOCKS, 3), (24, 1), 0),
        memory.view(torch.bfloat16).as_strided((BLOCKS, 2, 5), (48, 5, 1), 6),
    )
    caches = register_kv_caches(groups, BLOCKS, {"a": a, "m": states})
    assert [tuple(tensor.shape) for tensor in caches.tensors] == [(BLOCKS, 96)]
    assert [[(ref.offset, ref.nbytes) for ref in refs] for refs in caches.refs] == [
        [(0, 96)],
        [(0, 32)],
    ]
    scattered = torch.zeros(BLOCKS, 5, 2, dtype=torch.bfloat16).transpose(1, 2)
    with pytest.raises(LayoutError, match=r"state of shape \(2, 5\).*not contiguous"):
        register_kv_caches(groups, BLOCKS, {"a": a, "m": (states[0], scattered)})
