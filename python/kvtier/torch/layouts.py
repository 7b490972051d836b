"""In which order the axes of a KV cache lie in memory, and in which order a kernel names them.

The axes are the halves K and V, the block, the token in the block, the head, and the element of
a head. A *view* is what a kernel indexes: `(2, num_blocks, block_size, heads, dim)` or
`(num_blocks, 2, block_size, heads, dim)`. The *memory* order may differ: HND layouts keep all
tokens of a head together, and still show tokens before heads, through their strides.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

import torch

from kvtier.errors import LayoutError

__all__ = ["Axis", "KVLayout", "Part"]


class Axis(Enum):
    """An axis of a KV cache."""

    KV = "2"
    BLOCK = "B"
    TOKEN = "N"  # noqa: S105 - of a prompt
    HEAD = "H"
    DIM = "D"


class KVLayout(Enum):
    """How attention keeps K and V: the axes of the view, and their order in memory.

    `BLOCKS_*`: `(num_blocks, 2, ...)`, a block is one run of bytes. `KV_FIRST_*`: the view is
    `(2, num_blocks, ...)`, but in memory a block still is one run. `SPLIT_*`: the view is
    `(2, num_blocks, ...)`, and in memory all keys lie before all values. `PAIRED_*`: the key and
    the value of a token and head lie side by side, `(num_blocks, ..., 2, dim)`.
    """

    BLOCKS_NHD = ("B2NHD", "B2NHD")
    BLOCKS_HND = ("B2NHD", "B2HND")
    KV_FIRST_NHD = ("2BNHD", "B2NHD")
    KV_FIRST_HND = ("2BNHD", "B2HND")
    SPLIT_NHD = ("2BNHD", "2BNHD")
    SPLIT_HND = ("2BNHD", "2BHND")
    PAIRED_NHD = ("BNH2D", "BNH2D")
    PAIRED_HND = ("BHN2D", "BHN2D")

    @property
    def view(self) -> tuple[Axis, ...]:
        """Axes as a kernel indexes them."""
        return tuple(map(Axis, self.value[0]))

    @property
    def memory(self) -> tuple[Axis, ...]:
        """Axes from the outermost to the innermost in memory."""
        return tuple(map(Axis, self.value[1]))

    @property
    def is_split(self) -> bool:
        """Whether a block is two runs of bytes, far apart."""
        return self.memory[0] is not Axis.BLOCK


@dataclass(frozen=True)
class Part:
    """One array of a page: type, axes in memory and in the view, and their sizes."""

    dtype: torch.dtype
    memory: tuple[Axis, ...]
    view: tuple[Axis, ...]
    sizes: Mapping[Axis, int]
    """Of every axis but the block's."""
    shards: int = 1
    """Tensor-parallel ranks that hold different parts of the axis HEAD."""
    shape: tuple[int, ...] | None = None
    """What a kernel sees of one block in place of the view's axes, where that is another shape."""

    @property
    def page_axes(self) -> tuple[Axis, ...]:
        """Axes within a page, in memory order."""
        return tuple(axis for axis in self.memory if axis is not Axis.BLOCK)

    @property
    def page_shape(self) -> tuple[int, ...]:
        """Sizes of `page_axes`."""
        return tuple(self.sizes[axis] for axis in self.page_axes)

    @property
    def nbytes(self) -> int:
        """Bytes in one page."""
        return math.prod(self.page_shape) * self.dtype.itemsize

    @property
    def is_split(self) -> bool:
        """Whether the part of a block is several runs of bytes."""
        return self.memory[0] is not Axis.BLOCK

    def view_shape(self, num_blocks: int) -> tuple[int, ...]:
        """Shape of the tensor that a kernel gets."""
        if self.shape is not None:
            return (num_blocks, *self.shape)
        return tuple(num_blocks if axis is Axis.BLOCK else self.sizes[axis] for axis in self.view)

    def view_of(
        self, raw: torch.Tensor, num_blocks: int, start: int, block_stride: int
    ) -> torch.Tensor:
        """The kernel's view over `raw`, flat int8 storage; never a copy.

        The part of block 0 starts at byte `start`. Blocks are `block_stride` bytes apart; those
        of a split part lie densely. Raises `LayoutError` when an element would be misaligned.
        """
        item = self.dtype.itemsize
        if start % item or (block_stride % item and not self.is_split):
            raise LayoutError(
                f"{self.dtype} elements at byte {start}, {block_stride} bytes from block to "
                f"block, are misaligned: both must be multiples of {item}"
            )
        sizes = {**self.sizes, Axis.BLOCK: num_blocks}
        strides: dict[Axis, int] = {}
        step = 1
        for axis in reversed(self.memory):
            strides[axis] = step
            step *= sizes[axis]
        if not self.is_split:
            strides[Axis.BLOCK] = block_stride // item
        typed = raw.view(self.dtype).as_strided(
            [sizes[axis] for axis in self.view],
            [strides[axis] for axis in self.view],
            start // item,
        )
        if self.shape is None:
            return typed
        return typed.unflatten(-1, self.shape[1:]) if self.shape[1:] else typed.squeeze(-1)
