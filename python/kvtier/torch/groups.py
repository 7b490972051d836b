"""KV cache groups: the layers that share one block table, and so move together.

A chunk is `blocks_per_chunk` blocks of one group. Layers without memory of their own are in the
group of their owner; layers that keep nothing are in none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from kvtier.errors import LayoutError, SharingError
from kvtier.torch.kernel_blocks import why_not_split
from kvtier.torch.sharing import chain_text, resolve_sharing
from kvtier.torch.specs import LayerSpec, MambaSpec

__all__ = ["CacheGroup", "group_by_kind", "make_groups", "owners_of"]


@dataclass(frozen=True)
class CacheGroup:
    """Layers with one block table. Made by `make_groups`, which checks what it says."""

    specs: Mapping[str, LayerSpec]
    """Of the layers that own memory, in the order of a chunk."""
    sharing: Mapping[str, str]
    """Layers without memory, and the owner each one reads."""
    kernel_block_size: int
    """Tokens of the block that kernels address; a block is one or more of them."""

    @property
    def block_size(self) -> int:
        """Tokens of a block."""
        return next(iter(self.specs.values())).block_size

    @property
    def blocks_per_kv_block(self) -> int:
        """Kernel blocks of a block."""
        return self.block_size // self.kernel_block_size

    @property
    def has_tokens(self) -> bool:
        """Whether a block has a place for each of its tokens, and not one state for all."""
        return not isinstance(next(iter(self.specs.values())), MambaSpec)

    @property
    def layers(self) -> tuple[str, ...]:
        """All layers of the group: owners, then those that share."""
        return (*self.specs, *self.sharing)

    @property
    def page_bytes(self) -> int:
        """Bytes of one block of the group, without padding; shared layers count once."""
        return sum(spec.page_bytes for spec in self.specs.values())

    def kernel_spec(self, layer: str) -> LayerSpec:
        """The spec of an owner with blocks of the size that kernels address."""
        spec = self.specs[layer]
        if self.kernel_block_size == self.block_size:
            return spec
        return replace(spec, block_size=self.kernel_block_size)  # type: ignore[type-var]


def owners_of(specs: Mapping[str, LayerSpec], shared: Mapping[str, str]) -> dict[str, str]:
    """The owner of every layer that has a KV cache; owners own themselves.

    `specs` has every owner; a layer that shares may be in it, with the spec of its owner. Raises
    `SharingError` with the chain for cycles, unknown targets, targets that keep nothing and
    specs that differ.
    """
    names = [*specs, *(layer for layer in shared if layer not in specs)]
    owners = resolve_sharing(names, shared)
    for layer, owner in owners.items():
        if layer == owner:
            continue
        chain = chain_text(layer, shared)
        if owner not in specs:  # pragma: no cover - names outside specs are in `shared`
            raise SharingError(f"layer {owner!r} has no spec, but its KV cache is shared: {chain}")
        if not specs[owner].parts:
            raise SharingError(f"layer {owner!r} keeps no KV cache that can be shared: {chain}")
        if layer in specs and specs[layer] != specs[owner]:
            raise SharingError(
                f"layer {layer!r} shares the KV cache of {owner!r}, but their specs differ: "
                f"{specs[layer]} and {specs[owner]}; {chain}"
            )
    return {layer: owner for layer, owner in owners.items() if specs[owner].parts}


def group_by_kind(specs: Mapping[str, LayerSpec], owners: Sequence[str]) -> list[list[str]]:
    """Puts `owners` into groups that can share storage position by position.

    One kind of layer is one group, whatever the sizes of its pages. With several kinds, every
    group has about as many layers as the smallest kind (the largest one, where that is at most a
    quarter more), so that little storage is left unused; a kind with more layers becomes several
    groups, its layers dealt out in turn.
    """
    kinds: dict[tuple[object, ...], list[str]] = {}
    for owner in owners:
        kinds.setdefault(specs[owner].group_key, []).append(owner)
    if len(kinds) == 1:
        return list(kinds.values())
    counts = [len(layers) for layers in kinds.values()]
    width = max(counts) if 4 * max(counts) <= 5 * min(counts) else min(counts)
    groups: list[list[str]] = []
    for layers in kinds.values():
        number = -(-len(layers) // width)
        groups += [layers[index::number] for index in range(number)]
    return groups


def make_groups(
    layers: Sequence[Sequence[str]],
    specs: Mapping[str, LayerSpec],
    shared: Mapping[str, str] | None = None,
    kernel_block_sizes: Sequence[int | None] | None = None,
) -> tuple[CacheGroup, ...]:
    """Groups of the given layers; what shares joins its owner's group.

    `layers` names the layers of every group; those that share may be left out. A kernel block
    size of None is the block size. Raises `SharingError` as `owners_of` does, and for a layer in
    another group than its owner; `LayoutError` for layers that are missing, given twice, without
    a spec or of different kinds, and for blocks that can not be split.
    """
    shared = shared or {}
    owners = owners_of(specs, shared)
    group_of: dict[str, int] = {}
    for index, names in enumerate(layers):
        for name in names:
            if name not in owners:
                raise LayoutError(f"layer {name!r} of group {index} has no KV cache")
            if name in group_of:
                raise LayoutError(f"layer {name!r} is in group {group_of[name]} and in {index}")
            group_of[name] = index
    missing = [name for name, owner in owners.items() if name == owner and name not in group_of]
    if missing:
        raise LayoutError(f"layers in no group: {', '.join(missing)}")
    for name, owner in owners.items():
        if group_of.setdefault(name, group_of[owner]) != group_of[owner]:
            raise SharingError(
                f"layer {name!r} is in group {group_of[name]}, but the owner of its KV cache in "
                f"{group_of[owner]}: {chain_text(name, shared)}"
            )
    sizes = kernel_block_sizes or [None] * len(layers)
    if len(sizes) != len(layers):
        raise LayoutError(f"{len(sizes)} kernel block sizes for {len(layers)} groups")
    made = []
    for index, size in enumerate(sizes):
        members = [name for name in owners if group_of[name] == index]
        owned = {name: specs[name] for name in layers[index] if owners[name] == name}
        made.append(
            _checked(
                index,
                CacheGroup(
                    specs=owned,
                    sharing={name: owners[name] for name in members if name not in owned},
                    kernel_block_size=_block_size(index, owned) if size is None else size,
                ),
            )
        )
    return tuple(made)


def _block_size(index: int, specs: Mapping[str, LayerSpec]) -> int:
    if not specs:
        raise LayoutError(f"group {index} has no layer that owns a KV cache")
    return next(iter(specs.values())).block_size


def _checked(index: int, group: CacheGroup) -> CacheGroup:
    first, *others = group.specs
    for other in others:
        if group.specs[other].group_key != group.specs[first].group_key:
            raise LayoutError(
                f"group {index}: layers {first!r} and {other!r} can not share a block table: "
                f"{group.specs[first]} and {group.specs[other]}"
            )
    size, block_size = group.kernel_block_size, group.block_size
    if size < 1 or block_size % size:
        raise LayoutError(
            f"group {index}: kernel blocks of {size} tokens do not divide blocks of {block_size}"
        )
    for name, spec in group.specs.items():
        reason = why_not_split(spec, size)
        if reason:
            raise LayoutError(
                f"group {index}: blocks of layer {name!r} can not be split into kernel blocks of "
                f"{size} tokens: {reason}; use block_size = {size}"
            )
    return group
