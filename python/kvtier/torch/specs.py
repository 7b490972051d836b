"""What one layer keeps in the KV cache, and how many bytes a block of it takes.

A spec is a promise about layout, not memory: `kvtier.torch.plan` places layers, and
`kvtier.torch.kv_cache` makes tensors of them. Every kind of layer is one frozen dataclass.

A layer's *page* is what it keeps of one block. A page consists of *parts*, each an array of one
type: keys and values, their scales, the states of a Mamba layer. `docs/layouts.md` draws them.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, field

import torch

from kvtier.errors import LayoutError
from kvtier.torch.layouts import Axis, KVLayout, Part

__all__ = [
    "KV_DTYPES",
    "AttentionSpec",
    "ChunkedLocalSpec",
    "EncoderOnlySpec",
    "FullAttentionSpec",
    "LayerSpec",
    "MLASpec",
    "MambaSpec",
    "SlidingWindowSpec",
]

KV_DTYPES = (
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.int8,
    torch.uint8,
)
"""Types that a KV cache can have; uint8 is for formats that only their kernel understands."""


class LayerSpec(ABC):
    """The KV cache of one layer, in blocks of `block_size` tokens."""

    block_size: int
    padded_page_bytes: int | None
    """Bytes from one page to the next where that is more than `page_bytes`; None: no padding."""

    @property
    @abstractmethod
    def parts(self) -> tuple[Part, ...]:
        """The arrays of a page, in the order in which they lie in it; none: no cache."""

    @property
    @abstractmethod
    def group_key(self) -> tuple[object, ...]:
        """Layers with equal keys can have one block table: they hold the same tokens."""

    @property
    def storage_block_size(self) -> int:
        """Rows that a page has for the tokens of one block."""
        return self.block_size

    @property
    def page_bytes(self) -> int:
        """Bytes of one block of this layer, without padding at the end."""
        return max((end for _, end in self.part_ranges()), default=0)

    @property
    def page_stride(self) -> int:
        """Bytes from one page to the next in storage of this layer alone."""
        return self.padded_page_bytes or self.page_bytes

    @property
    def alignment(self) -> int:
        """Pages start at multiples of so many bytes: the largest element of all parts."""
        return max((part.dtype.itemsize for part in self.parts), default=1)

    def part_ranges(self) -> list[tuple[int, int]]:
        """First byte and end of each part in the page, each aligned to its elements."""
        ranges: list[tuple[int, int]] = []
        end = 0
        for part in self.parts:
            start = -(-end // part.dtype.itemsize) * part.dtype.itemsize
            end = start + part.nbytes
            ranges.append((start, end))
        return ranges

    def _check(self, **sizes: int) -> None:
        """Raises `LayoutError` for a size that is no positive integer, and for bad padding.

        Padding must not be smaller than the page, nor leave elements misaligned.
        """
        for name, value in sizes.items():
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise LayoutError(
                    f"{self._kind}: {name} is {value!r}, but must be an integer above 0"
                )
        padded = self.padded_page_bytes
        if padded is not None and (padded < self.page_bytes or padded % self.alignment):
            raise LayoutError(
                f"{self._kind}: padded_page_bytes is {padded}, but must be a multiple of "
                f"{self.alignment} and {self.page_bytes} or more"
            )

    def _check_dtype(self, dtype: torch.dtype) -> None:
        if dtype not in KV_DTYPES:
            known = ", ".join(str(known) for known in KV_DTYPES)
            raise LayoutError(f"{self._kind}: dtype is {dtype!r}, but must be one of {known}")

    @property
    def _kind(self) -> str:
        return type(self).__name__


@dataclass(frozen=True)
class AttentionSpec(LayerSpec):
    """Keys and values of every token; the base of the kinds of attention that keep both.

    With `scales`, every token and head has a float32 scale for its keys and one for its values,
    behind the data of the page. `total_kv_heads` are the heads over all ranks of tensor
    parallelism: None where this layer is not split. Raises `LayoutError` for a size below 1, a
    type that is none of `KV_DTYPES`, or heads that do not divide.
    """

    block_size: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    layout: KVLayout = KVLayout.KV_FIRST_NHD
    scales: bool = False
    padded_page_bytes: int | None = None
    total_kv_heads: int | None = None

    def __post_init__(self) -> None:
        """Checks the fields, so that a spec that exists is a valid one."""
        self._check_dtype(self.dtype)
        if not isinstance(self.layout, KVLayout):
            raise LayoutError(f"{self._kind}: layout is {self.layout!r}, but must be a KVLayout")
        total = self.num_kv_heads if self.total_kv_heads is None else self.total_kv_heads
        self._check(
            block_size=self.block_size,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            total_kv_heads=total,
        )
        if total % self.num_kv_heads:
            raise LayoutError(
                f"{self._kind}: total_kv_heads is {total}, but must be a multiple of the "
                f"{self.num_kv_heads} heads of this rank"
            )
        if self.layout.is_split and self.padded_page_bytes is not None:
            raise LayoutError(
                f"{self._kind}: {self.layout.name} keeps keys and values apart, so its pages can "
                f"not be padded; use {KVLayout.KV_FIRST_NHD.name}"
            )

    @property
    def parts(self) -> tuple[Part, ...]:
        """Keys and values; then, with `scales`, their scales without the last axis."""
        total = self.total_kv_heads or self.num_kv_heads
        sizes = {
            Axis.KV: 2,
            Axis.TOKEN: self.block_size,
            Axis.HEAD: self.num_kv_heads,
            Axis.DIM: self.head_dim,
        }
        shards = total // self.num_kv_heads
        data = Part(self.dtype, self.layout.memory, self.layout.view, sizes, shards)
        if not self.scales:
            return (data,)
        memory, view = (
            tuple(axis for axis in axes if axis is not Axis.DIM)
            for axes in (self.layout.memory, self.layout.view)
        )
        return (data, Part(torch.float32, memory, view, sizes, shards))

    @property
    def group_key(self) -> tuple[object, ...]:
        """Kind and block size."""
        return (self._kind, self.block_size)


@dataclass(frozen=True)
class FullAttentionSpec(AttentionSpec):
    """Attention to everything before: a request keeps all of its blocks."""


@dataclass(frozen=True)
class SlidingWindowSpec(AttentionSpec):
    """Attention to the last `window` tokens."""

    window: int = field(kw_only=True)

    def __post_init__(self) -> None:
        """Checks the fields."""
        super().__post_init__()
        self._check(window=self.window)

    @property
    def group_key(self) -> tuple[object, ...]:
        """Kind, block size and window."""
        return (*super().group_key, self.window)


@dataclass(frozen=True)
class ChunkedLocalSpec(AttentionSpec):
    """Attention within pieces of `attention_chunk` tokens, aligned to the start of the prompt."""

    attention_chunk: int = field(kw_only=True)

    def __post_init__(self) -> None:
        """Checks the fields."""
        super().__post_init__()
        self._check(attention_chunk=self.attention_chunk)

    @property
    def group_key(self) -> tuple[object, ...]:
        """Kind, block size and attention chunk."""
        return (*super().group_key, self.attention_chunk)


@dataclass(frozen=True)
class MLASpec(LayerSpec):
    """One latent vector instead of keys and values, the same on every tensor-parallel rank.

    A page is `(storage_block_size, latent_dim)`. Formats that keep one row for several tokens
    have a storage block smaller than the block: it must divide it.
    """

    block_size: int
    latent_dim: int
    dtype: torch.dtype
    rows_per_block: int | None = None
    padded_page_bytes: int | None = None

    def __post_init__(self) -> None:
        """Checks the fields."""
        self._check_dtype(self.dtype)
        self._check(
            block_size=self.block_size,
            latent_dim=self.latent_dim,
            rows_per_block=self.storage_block_size,
        )
        if self.block_size % self.storage_block_size:
            raise LayoutError(
                f"MLASpec: rows_per_block is {self.storage_block_size}, but must divide the "
                f"block size, {self.block_size}"
            )

    @property
    def storage_block_size(self) -> int:
        """`rows_per_block`, or the block size where that is None."""
        return self.block_size if self.rows_per_block is None else self.rows_per_block

    @property
    def parts(self) -> tuple[Part, ...]:
        """The latent vectors."""
        axes = (Axis.BLOCK, Axis.TOKEN, Axis.DIM)
        sizes = {Axis.TOKEN: self.storage_block_size, Axis.DIM: self.latent_dim}
        return (Part(self.dtype, axes, axes, sizes),)

    @property
    def group_key(self) -> tuple[object, ...]:
        """Kind and both block sizes."""
        return (self._kind, self.block_size, self.storage_block_size)


@dataclass(frozen=True)
class MambaSpec(LayerSpec):
    """The recurrent states of a Mamba or linear-attention layer: one page is one snapshot.

    `shapes` and `dtypes` name the states in the order in which they lie in the page. The first
    axis of each state is the one that tensor parallelism splits; `shards` ranks have different
    parts of it.
    """

    block_size: int
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[torch.dtype, ...]
    padded_page_bytes: int | None = None
    shards: int = 1

    def __post_init__(self) -> None:
        """Checks the fields."""
        if not self.shapes or len(self.shapes) != len(self.dtypes):
            raise LayoutError(
                f"MambaSpec: {len(self.shapes)} shapes and {len(self.dtypes)} dtypes, but every "
                f"state needs both, and a layer at least one state"
            )
        for shape, dtype in zip(self.shapes, self.dtypes, strict=True):
            self._check_dtype(dtype)
            if not shape or min(shape) < 1:
                raise LayoutError(f"MambaSpec: a state of shape {shape} is not possible")
        self._check(block_size=self.block_size, shards=self.shards)

    @property
    def parts(self) -> tuple[Part, ...]:
        """One part a state: the axis that is split, and the rest as one axis."""
        axes = (Axis.BLOCK, Axis.HEAD, Axis.DIM)
        return tuple(
            Part(
                dtype,
                axes,
                axes,
                {Axis.HEAD: shape[0], Axis.DIM: math.prod(shape[1:])},
                self.shards,
                shape,
            )
            for shape, dtype in zip(self.shapes, self.dtypes, strict=True)
        )

    @property
    def group_key(self) -> tuple[object, ...]:
        """Kind and block size; states of one kind of layer are snapshots of the same tokens."""
        return (self._kind, self.block_size)


@dataclass(frozen=True)
class EncoderOnlySpec(LayerSpec):
    """A layer that keeps nothing: it attends to what it gets in one pass."""

    block_size: int = 1
    padded_page_bytes: int | None = None

    @property
    def parts(self) -> tuple[Part, ...]:
        """Nothing."""
        return ()

    @property
    def group_key(self) -> tuple[object, ...]:
        """The kind; such layers are in no group."""
        return (self._kind,)
