"""From specs and memory to groups, storages and the number of blocks.

A block id names the same bytes for every group, and belongs to one group at a time. So groups
lie over each other: position `i` of every group is one storage. That wants one stride a storage;
smaller pages are padded to it.

Two arrangements:

* layers apart: one storage a position, `(num_blocks, stride)`;
* packed: one storage, `(num_blocks, sum of strides)`, the pages of all layers of a block side by
  side, so that a block of a group is one run of bytes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvtier.errors import LayoutError
from kvtier.torch.groups import CacheGroup, group_by_kind, make_groups, owners_of
from kvtier.torch.specs import AttentionSpec, LayerSpec

__all__ = ["KVCachePlan", "Placement", "plan_kv_cache"]

_PACKED_ALIGNMENT = 16
"""Copies of packed pages then work in the widest words."""


@dataclass(frozen=True)
class Placement:
    """Where the pages of a layer lie: block `b` at byte `offset + b * stride` of a storage."""

    storage: int
    offset: int
    stride: int


@dataclass(frozen=True)
class KVCachePlan:
    """What `allocate` makes. Made by `plan_kv_cache`."""

    num_blocks: int
    groups: tuple[CacheGroup, ...]
    placements: Mapping[str, Placement]
    """Of every layer that owns memory."""
    storage_bytes: tuple[int, ...]
    """Bytes of each storage."""

    @property
    def nbytes(self) -> int:
        """Bytes in all."""
        return sum(self.storage_bytes)


def plan_kv_cache(
    specs: Mapping[str, LayerSpec],
    *,
    num_blocks: int | None = None,
    memory_bytes: int | None = None,
    shared: Mapping[str, str] | None = None,
    packed: bool = False,
    kernel_block_sizes: Sequence[int | None] | None = None,
) -> KVCachePlan:
    """Plans `num_blocks` blocks, or as many as fit into `memory_bytes`.

    `shared` maps a layer to the layer whose KV cache it uses; `kernel_block_sizes` has one entry
    a group, in the order of the plan's groups. Raises `LayoutError` for sizes that are not
    possible and layouts that can not lie over each other, `SharingError` as `make_groups` does.
    """
    shared = shared or {}
    owned = [name for name, owner in owners_of(specs, shared).items() if name == owner]
    if not owned:
        raise LayoutError("a KV cache needs the spec of one layer that keeps something or more")
    layers = group_by_kind(specs, owned)
    groups = make_groups(layers, specs, shared, kernel_block_sizes)
    _refuse_split_layouts(groups, packed=packed)
    placements, strides = (_pack if packed else _spread)(groups)
    _refuse_split_blocks(groups, placements)
    count = _count_blocks(sum(strides), num_blocks, memory_bytes)
    return KVCachePlan(count, groups, placements, tuple(count * stride for stride in strides))


def _spread(groups: Sequence[CacheGroup]) -> tuple[dict[str, Placement], list[int]]:
    """One storage a position; its stride fits the widest page of all groups there."""
    strides: list[int] = []
    for position in range(max(len(group.specs) for group in groups)):
        here = [
            list(group.specs.values())[position] for group in groups if position < len(group.specs)
        ]
        alignment = math.lcm(*(spec.alignment for spec in here))
        strides.append(_round_up(max(spec.page_stride for spec in here), alignment))
    placements = {
        name: Placement(position, 0, strides[position])
        for group in groups
        for position, name in enumerate(group.specs)
    }
    return placements, strides


def _pack(groups: Sequence[CacheGroup]) -> tuple[dict[str, Placement], list[int]]:
    """One storage; its stride fits the widest block of all groups."""
    offsets: dict[str, int] = {}
    stride = 0
    for group in groups:
        end = 0
        for name, spec in group.specs.items():
            offsets[name] = end
            end += _round_up(spec.page_stride, _PACKED_ALIGNMENT)
        stride = max(stride, end)
    return {name: Placement(0, offset, stride) for name, offset in offsets.items()}, [stride]


def _refuse_split_layouts(groups: Sequence[CacheGroup], *, packed: bool) -> None:
    if not packed and len(groups) == 1:
        return
    why = "blocks are packed" if packed else f"{len(groups)} groups lie over each other"
    for group in groups:
        for name, spec in group.specs.items():
            if isinstance(spec, AttentionSpec) and spec.layout.is_split:
                raise LayoutError(
                    f"layer {name!r}: {spec.layout.name} keeps keys and values apart, which is "
                    f"not possible where {why}; use KV_FIRST_NHD or KV_FIRST_HND, which show a "
                    f"kernel the same axes"
                )


def _refuse_split_blocks(groups: Sequence[CacheGroup], placements: Mapping[str, Placement]) -> None:
    """Kernel blocks are evenly spaced only where the pages of a layer lie densely."""
    for group in groups:
        if group.blocks_per_kv_block == 1:
            continue
        for name, spec in group.specs.items():
            stride = placements[name].stride
            if stride != spec.page_bytes:
                raise LayoutError(
                    f"layer {name!r}: pages of {spec.page_bytes} bytes, {stride} bytes apart, can "
                    f"not be split into kernel blocks of {group.kernel_block_size} tokens; use "
                    f"block_size = {group.kernel_block_size}, or layers that are not packed"
                )


def _count_blocks(block_bytes: int, num_blocks: int | None, memory_bytes: int | None) -> int:
    if (num_blocks is None) == (memory_bytes is None):
        raise LayoutError("a KV cache needs either num_blocks or memory_bytes")
    if memory_bytes is not None:
        num_blocks = memory_bytes // block_bytes
        if num_blocks < 1:
            raise LayoutError(
                f"{memory_bytes} bytes are not enough for one block, which takes {block_bytes}"
            )
    if num_blocks is None or num_blocks < 1:
        raise LayoutError(f"num_blocks is {num_blocks}, but must be 1 or more")
    return num_blocks


def _round_up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple
