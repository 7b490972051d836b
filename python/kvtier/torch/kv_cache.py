"""Allocates the paged KV cache and shows it twice: to attention, and to transfers.

The storage of a layer is `(num_blocks, *page_shape)`, so that the page of one block is one
contiguous run of bytes. Attention sees `layer_views`, transfers see `canonical`: int8 of
shape `(num_blocks, page_bytes)`. Both are views of the same storage, never a copy.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from kvtier.errors import LayoutError, SharingError
from kvtier.torch.sharing import resolve_sharing
from kvtier.torch.specs import LayerSpec

__all__ = ["KVCache", "allocate_kv_cache"]


@dataclass(frozen=True)
class KVCache:
    """The KV cache of one group of layers, `num_blocks` blocks of `block_size` tokens."""

    num_blocks: int
    block_size: int
    layer_views: dict[str, torch.Tensor]
    """What attention indexes, by layer; layers that share have the very same tensor."""
    canonical: list[torch.Tensor]
    """int8 `(num_blocks, page_bytes)`, one for every storage, in the order of `owners`."""
    owners: list[str]
    """The layer that owns each canonical tensor."""

    @property
    def page_bytes(self) -> int:
        """Bytes of one block over all storages."""
        return sum(tensor.shape[1] for tensor in self.canonical)

    @property
    def nbytes(self) -> int:
        """Bytes of the whole cache; shared layers count once."""
        return self.num_blocks * self.page_bytes

    @property
    def device(self) -> torch.device:
        """Where the cache lives."""
        return self.canonical[0].device


def allocate_kv_cache(
    specs: Mapping[str, LayerSpec],
    num_blocks: int,
    device: torch.device | str,
    *,
    shared: Mapping[str, str] | None = None,
) -> KVCache:
    """Allocates zeroed storage for every layer that owns one.

    `shared` maps a layer to the layer whose KV cache it uses (see `resolve_sharing`). A
    sharing layer may have a spec, which must then equal the owner's, or none.

    Raises `LayoutError` when there is no layer, `num_blocks` is below 1, block sizes differ or
    a sharing layer has another spec than its owner; `SharingError` for cycles and unknown
    targets.
    """
    shared = shared or {}
    if not specs:
        raise LayoutError("a KV cache needs the spec of one layer or more, but got none")
    if num_blocks < 1:
        raise LayoutError(f"num_blocks is {num_blocks}, but must be 1 or more")
    owner_of = resolve_sharing([*specs, *(layer for layer in shared if layer not in specs)], shared)
    for layer, owner in owner_of.items():
        if owner not in specs:
            raise SharingError(f"layer {owner!r} owns the KV cache of {layer!r}, but has no spec")
        if layer in specs and specs[layer] != specs[owner]:
            raise LayoutError(
                f"layer {layer!r} shares the KV cache of {owner!r}, but their specs differ: "
                f"{specs[layer]} and {specs[owner]}"
            )
    owners = [layer for layer in specs if owner_of[layer] == layer]
    block_size = specs[owners[0]].block_size
    for owner in owners:
        if specs[owner].block_size != block_size:
            raise LayoutError(
                f"layers of one group need one block size, but {owners[0]!r} has {block_size} "
                f"and {owner!r} has {specs[owner].block_size}"
            )
    views: dict[str, torch.Tensor] = {}
    canonical: list[torch.Tensor] = []
    for owner in owners:
        spec = specs[owner]
        raw = torch.zeros((num_blocks, spec.page_bytes), dtype=torch.int8, device=device)
        canonical.append(raw)
        pages = raw.view(-1).view(spec.dtype).view(num_blocks, *spec.page_shape)
        views[owner] = spec.layer_view(pages)
    return KVCache(
        num_blocks=num_blocks,
        block_size=block_size,
        layer_views={layer: views[owner] for layer, owner in owner_of.items()},
        canonical=canonical,
        owners=owners,
    )
