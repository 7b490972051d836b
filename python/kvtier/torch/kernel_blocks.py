"""Blocks that kernels address: a whole block, or an even part of one.

An attention backend supports certain sizes. Where none of them is the engine's block, a block is
shown as several smaller ones; nothing moves, since a page is read as several smaller pages.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from kvtier.errors import LayoutError
from kvtier.torch.specs import LayerSpec, MambaSpec

__all__ = ["MultipleOf", "SupportedSizes", "kernel_block_size", "why_not_split"]


@dataclass(frozen=True)
class MultipleOf:
    """A backend that supports every multiple of `base` tokens."""

    base: int


SupportedSizes: TypeAlias = Sequence[int | MultipleOf]
"""What one backend supports."""


def kernel_block_size(
    specs: Mapping[str, LayerSpec], backends: Mapping[str, SupportedSizes]
) -> int:
    """The largest size of a kernel block that all backends of a group support.

    `specs` are the group's layers, `backends` the sizes that each backend of theirs supports, by
    its name. Raises `LayoutError` when there is none that divides the block, and when the layers
    can not be split and a backend does not support the whole block.
    """
    layer, spec = next(iter(specs.items()))
    block_size = spec.block_size
    sizes = [size for size in range(block_size, 0, -1) if block_size % size == 0]
    fitting = [size for size in sizes if all(_supports(known, size) for known in backends.values())]
    if not fitting:
        known = "; ".join(f"{name}: {_text(sizes)}" for name, sizes in backends.items())
        raise LayoutError(
            f"no size of kernel blocks divides blocks of {block_size} tokens and is supported by "
            f"all backends ({known}); use another block size"
        )
    size = fitting[0]
    for layer, spec in specs.items():
        reason = why_not_split(spec, size)
        if reason:
            raise LayoutError(
                f"blocks of layer {layer!r} can not be split into kernel blocks of {size} tokens, "
                f"the largest that all backends support: {reason}; use block_size = {size}"
            )
    return size


def why_not_split(spec: LayerSpec, size: int) -> str | None:
    """Why the blocks of a layer can not be split into kernel blocks of `size`; None: they can."""
    if size == spec.block_size:
        return None
    if isinstance(spec, MambaSpec):
        return "a state covers the whole block"
    if spec.storage_block_size != spec.block_size:
        return f"it stores {spec.storage_block_size} rows for the {spec.block_size} tokens"
    if spec.page_stride != spec.page_bytes:
        return "its pages are padded"
    small: LayerSpec = replace(spec, block_size=size)  # type: ignore[type-var]
    if small.page_bytes * (spec.block_size // size) != spec.page_bytes:
        return "its parts would be aligned differently"
    return None


def _supports(sizes: SupportedSizes, size: int) -> bool:
    return any(
        size % known.base == 0 if isinstance(known, MultipleOf) else size == known
        for known in sizes
    )


def _text(sizes: SupportedSizes) -> str:
    return ", ".join(
        f"multiples of {known.base}" if isinstance(known, MultipleOf) else str(known)
        for known in sizes
    )
