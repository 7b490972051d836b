"""Allocates the paged KV cache and shows it twice: to kernels, and to transfers.

Kernels see `layer_views`, in the axes that the layer's spec names; transfers see `canonical`,
int8 rows. Both are views of the same storage, never a copy.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from kvtier.errors import LayoutError
from kvtier.torch.canonical import CanonicalKVCaches, register_kv_caches
from kvtier.torch.groups import CacheGroup
from kvtier.torch.plan import KVCachePlan, plan_kv_cache
from kvtier.torch.specs import LayerSpec

__all__ = ["KVCache", "LayerView", "allocate", "allocate_kv_cache"]

LayerView = torch.Tensor | tuple[torch.Tensor, ...]
"""What a kernel gets of a layer: one tensor, or one a part (data and scales, Mamba states)."""


@dataclass(frozen=True)
class KVCache:
    """A KV cache of `num_blocks` blocks; made by `allocate`."""

    plan: KVCachePlan
    layer_views: dict[str, LayerView]
    """By layer; layers that share have the very same tensors."""
    canonical: CanonicalKVCaches
    """What transfers move."""

    @property
    def num_blocks(self) -> int:
        """Blocks of the cache; a block belongs to one group at a time."""
        return self.plan.num_blocks

    @property
    def groups(self) -> tuple[CacheGroup, ...]:
        """The groups, in the order of their indices."""
        return self.plan.groups

    @property
    def page_bytes(self) -> int:
        """Bytes of one block of the widest group: what a slot needs for each block of a chunk."""
        return max(group.page_bytes for group in self.groups)

    def view(self, layer: str) -> torch.Tensor:
        """The one tensor of a layer; raises `LayoutError` for a layer that has several."""
        view = self.layer_views[layer]
        if isinstance(view, torch.Tensor):
            return view
        raise LayoutError(f"layer {layer!r} has {len(view)} tensors: see layer_views")

    @property
    def nbytes(self) -> int:
        """Bytes of the storage; shared layers and groups that lie over each other count once."""
        return self.plan.nbytes

    @property
    def device(self) -> torch.device:
        """Where the cache lives."""
        return self.canonical.device


def allocate(plan: KVCachePlan, device: torch.device | str) -> KVCache:
    """Allocates zeroed storage for `plan`, and every layer's view of it.

    A group whose kernel blocks are smaller than its blocks has views with that many more and
    smaller blocks. Raises what torch raises when the memory can not be had.
    """
    storages = [torch.zeros(size, dtype=torch.int8, device=device) for size in plan.storage_bytes]
    views: dict[str, LayerView] = {}
    for group in plan.groups:
        ratio = group.blocks_per_kv_block
        for name in group.specs:
            place, spec = plan.placements[name], group.kernel_spec(name)
            count, stride = plan.num_blocks * ratio, place.stride // ratio
            parts = tuple(
                part.view_of(
                    storages[place.storage],
                    count,
                    place.offset + start * (count if part.is_split else 1),
                    stride,
                )
                for part, (start, _) in zip(spec.parts, spec.part_ranges(), strict=True)
            )
            views[name] = parts if len(parts) > 1 else parts[0]
        for name, owner in group.sharing.items():
            views[name] = views[owner]
    canonical = register_kv_caches(plan.groups, plan.num_blocks, views)
    return KVCache(plan=plan, layer_views=views, canonical=canonical)


def allocate_kv_cache(
    specs: Mapping[str, LayerSpec],
    num_blocks: int,
    device: torch.device | str,
    *,
    shared: Mapping[str, str] | None = None,
    packed: bool = False,
    kernel_block_sizes: Sequence[int | None] | None = None,
) -> KVCache:
    """Plans and allocates at once; see `plan_kv_cache` for the arguments and the errors."""
    plan = plan_kv_cache(
        specs,
        num_blocks=num_blocks,
        shared=shared,
        packed=packed,
        kernel_block_sizes=kernel_block_sizes,
    )
    return allocate(plan, device)
