import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier.errors import LayoutError, SharingError
from kvtier.torch import FullAttentionSpec, allocate_kv_cache

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int8)


def spec(
    block: int = 4, heads: int = 2, dim: int = 8, dtype: torch.dtype = torch.float32
) -> FullAttentionSpec:
    return FullAttentionSpec(block, heads, dim, dtype)


@settings(deadline=None)
@given(
    st.integers(1, 4),
    st.integers(1, 6),
    st.integers(1, 5),
    st.integers(1, 3),
    st.integers(1, 8),
    st.sampled_from(DTYPES),
)
def test_canonical_and_layer_views_are_the_same_bytes(
    layers: int, blocks: int, block: int, heads: int, dim: int, dtype: torch.dtype
) -> None:
    specs = {f"l{index}": spec(block, heads, dim, dtype) for index in range(layers)}
    cache = allocate_kv_cache(specs, blocks, "cpu")
    assert cache.owners == list(specs)
    assert cache.page_bytes == layers * 2 * block * heads * dim * dtype.itemsize
    assert cache.nbytes == blocks * cache.page_bytes
    for number, name in enumerate(cache.owners):
        view, raw = cache.layer_views[name], cache.canonical[number]
        assert view.shape == (2, blocks, block, heads, dim)
        assert raw.shape == (blocks, 2 * block * heads * dim * dtype.itemsize)
        assert raw.dtype == torch.int8
        assert raw.untyped_storage().data_ptr() == view.untyped_storage().data_ptr()
        # What attention writes is what transfers see, block by block ...
        values = torch.randint(-100, 100, view.shape).to(dtype)
        view.copy_(values)
        for index in range(blocks):
            page = values[:, index].contiguous().view(torch.int8).view(-1)
            assert torch.equal(raw[index], page)
        # ... and what transfers write is what attention sees.
        copy = raw.clone()
        raw.zero_()
        assert not view.any()
        raw.copy_(copy)
        assert torch.equal(view, values)


def test_shared_layers_get_the_very_same_tensor() -> None:
    specs = {"c": spec(), "b": spec(), "a": spec()}
    cache = allocate_kv_cache(specs, 3, "cpu", shared={"c": "b", "b": "a", "d": "c"})
    assert cache.owners == ["a"]
    assert len(cache.canonical) == 1
    assert len({id(view) for view in cache.layer_views.values()}) == 1
    assert set(cache.layer_views) == {"a", "b", "c", "d"}


def test_what_does_not_fit_together_is_refused() -> None:
    with pytest.raises(LayoutError, match="none"):
        allocate_kv_cache({}, 1, "cpu")
    with pytest.raises(LayoutError, match="num_blocks is 0"):
        allocate_kv_cache({"a": spec()}, 0, "cpu")
    with pytest.raises(LayoutError, match="'a' has 4 and 'b' has 8"):
        allocate_kv_cache({"a": spec(4), "b": spec(8)}, 1, "cpu")
    with pytest.raises(LayoutError, match="specs differ"):
        allocate_kv_cache({"a": spec(), "b": spec(heads=1)}, 1, "cpu", shared={"b": "a"})
    with pytest.raises(SharingError, match="does not exist"):
        allocate_kv_cache({"a": spec()}, 1, "cpu", shared={"b": "c"})
    with pytest.raises(LayoutError, match="num_kv_heads is 0"):
        spec(heads=0)
    with pytest.raises(LayoutError, match="dtype"):
        spec(dtype="float32")  # type: ignore[arg-type]
