"""What the property tests of the torch side draw: specs of every kind, groups, sharing."""

from dataclasses import dataclass, field, replace
from typing import TypeVar

import torch
from hypothesis import strategies as st

from kvtier.torch import (
    AttentionSpec,
    CanonicalKVCaches,
    ChunkedLocalSpec,
    EncoderOnlySpec,
    FullAttentionSpec,
    KVCache,
    KVLayout,
    LayerSpec,
    MambaSpec,
    MLASpec,
    SlidingWindowSpec,
    allocate_kv_cache,
)
from kvtier.torch.specs import KV_DTYPES

BLOCKS = 5
SpecT = TypeVar("SpecT", AttentionSpec, MLASpec, MambaSpec)
WHOLE_LAYOUTS = [layout for layout in KVLayout if not layout.is_split]


@st.composite
def attention(
    draw: st.DrawFn, kind: type[AttentionSpec] = FullAttentionSpec, *, split: bool = False
) -> AttentionSpec:
    """Attention of any layout; with keys and values apart only where `split` says so."""
    own: dict[type[AttentionSpec], dict[str, int]] = {
        SlidingWindowSpec: {"window": 7},
        ChunkedLocalSpec: {"attention_chunk": 8},
    }
    spec = kind(
        block_size=4,
        num_kv_heads=draw(st.integers(1, 3)),
        head_dim=draw(st.sampled_from([1, 2, 5, 8])),
        dtype=draw(st.sampled_from(KV_DTYPES)),
        layout=draw(st.sampled_from(list(KVLayout) if split else WHOLE_LAYOUTS)),
        scales=draw(st.booleans()),
        **own.get(kind, {}),
    )
    return spec if spec.layout.is_split else draw(padded(spec))


@st.composite
def mla(draw: st.DrawFn) -> MLASpec:
    spec = MLASpec(
        block_size=4,
        latent_dim=draw(st.integers(1, 9)),
        dtype=draw(st.sampled_from(KV_DTYPES)),
        rows_per_block=draw(st.sampled_from([None, 1, 2])),
    )
    return draw(padded(spec))


@st.composite
def mamba(draw: st.DrawFn) -> MambaSpec:
    shapes = draw(
        st.lists(st.lists(st.integers(1, 4), min_size=1, max_size=3), min_size=1, max_size=3)
    )
    spec = MambaSpec(
        block_size=8,
        shapes=tuple(map(tuple, shapes)),
        dtypes=tuple(draw(st.sampled_from(KV_DTYPES)) for _ in shapes),
    )
    return draw(padded(spec))


@st.composite
def padded(draw: st.DrawFn, spec: SpecT) -> SpecT:
    """The spec, in one of two cases with padding behind its pages."""
    if draw(st.booleans()):
        return spec
    pages = -(-spec.page_bytes // spec.alignment) + draw(st.integers(0, 3))
    return replace(spec, padded_page_bytes=pages * spec.alignment)


@dataclass
class Drawn:
    """The arguments of `allocate_kv_cache`."""

    specs: dict[str, LayerSpec]
    shared: dict[str, str] = field(default_factory=dict)
    packed: bool = False

    def allocate(self, num_blocks: int = BLOCKS) -> KVCache:
        return allocate_kv_cache(
            self.specs, num_blocks, "cpu", shared=self.shared, packed=self.packed
        )


@st.composite
def caches(draw: st.DrawFn) -> Drawn:
    """A model: one kind of layer or several, some of them sharing, declared in any order."""
    kinds = [
        attention(),
        attention(SlidingWindowSpec),
        attention(ChunkedLocalSpec),
        mla(),
        mamba(),
    ]
    chosen = draw(st.lists(st.sampled_from(range(len(kinds))), min_size=1, max_size=3, unique=True))
    packed = draw(st.booleans())
    if len(chosen) == 1 and not packed:
        kinds[0] = attention(split=True)
    layers: list[tuple[str, LayerSpec]] = []
    rows = draw(st.sampled_from([None, 2]))
    for kind in chosen:
        for spec in draw(st.lists(kinds[kind], min_size=1, max_size=3)):
            if isinstance(spec, MLASpec):  # one group: the same rows in every layer
                spec = replace(spec, rows_per_block=rows, padded_page_bytes=None)
            layers.append((f"layer{len(layers)}", spec))
    owners = [name for name, _ in layers]
    if draw(st.booleans()):
        layers.append(("encoder", EncoderOnlySpec()))
    shared: dict[str, str] = {}
    for number in range(draw(st.integers(0, 3))):
        shared[f"reader{number}"] = draw(st.sampled_from([*owners, *shared]))
    layers = draw(st.permutations(layers))
    declared = dict(draw(st.permutations(list(shared.items()))))
    return Drawn(dict(layers), declared, packed)


def fill(cache: KVCache, seed: int) -> None:
    """Random bytes in all of the storage that belongs to a page."""
    draw = torch.Generator().manual_seed(seed)
    for tensor in cache.canonical.tensors:
        tensor.copy_(torch.randint(-128, 128, tensor.shape, generator=draw, dtype=torch.int8))


def read_page(caches: CanonicalKVCaches, group: int, layer: str, block: int) -> torch.Tensor:
    """The page of one layer and block by way of the rows, int8 `(page_bytes,)`; gaps are zeros."""
    nbytes = caches.groups[group].specs[layer].page_bytes
    page = torch.zeros(nbytes, dtype=torch.int8, device=caches.device)
    for ref in caches.refs[group]:
        if ref.layer == layer:
            row = caches.tensors[ref.tensor][block]
            end = ref.page_offset + ref.nbytes
            page[ref.page_offset : end] = row[ref.offset : ref.offset + ref.nbytes]
    return page


def pages_of(cache: KVCache, block: int) -> list[bytes]:
    """The pages of all layers of a block, group by group, by way of the kernels' views."""
    pages = []
    for group in cache.groups:
        for layer, spec in group.specs.items():
            views = cache.layer_views[layer]
            parts = (views,) if isinstance(views, torch.Tensor) else views
            page = bytearray(spec.page_bytes)
            for part, (start, end), view in zip(spec.parts, spec.part_ranges(), parts, strict=True):
                axes = part.view if part.shape is None else part.memory
                at = [axis.name for axis in axes].index("BLOCK")
                one = view.select(at, block)
                if part.shape is None:
                    named = [axis for axis in axes if axis.name != "BLOCK"]
                    one = one.permute([named.index(axis) for axis in part.page_axes])
                raw = one.contiguous().view(-1).view(torch.uint8)
                page[start:end] = bytes(raw.tolist())
            pages.append(bytes(page))
    return pages
