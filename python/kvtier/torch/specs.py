"""What one layer keeps in the KV cache, and how many bytes a block of it takes.

A spec is a promise about layout, not memory: `allocate_kv_cache` turns specs into tensors.
Every kind of layer is one frozen dataclass below `LayerSpec`.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch

from kvtier.errors import LayoutError

__all__ = ["FullAttentionSpec", "LayerSpec"]


class LayerSpec(ABC):
    """The KV cache of one layer, in blocks of `block_size` tokens of type `dtype`."""

    block_size: int
    dtype: torch.dtype

    @property
    @abstractmethod
    def page_shape(self) -> tuple[int, ...]:
        """Shape of one block's page, in elements of `dtype`, as it lies in memory."""

    @property
    def page_bytes(self) -> int:
        """Bytes of one block of this layer."""
        return math.prod(self.page_shape) * self.dtype.itemsize

    @abstractmethod
    def layer_view(self, pages: torch.Tensor) -> torch.Tensor:
        """The view that attention code indexes; never a copy.

        `pages` has the shape `(num_blocks, *page_shape)`.
        """

    def _check(self, **sizes: int) -> None:
        """Raises `LayoutError` for the first size that is no positive integer."""
        kind = type(self).__name__
        for name, value in sizes.items():
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise LayoutError(f"{kind}: {name} is {value!r}, but must be an integer above 0")
        if not isinstance(self.dtype, torch.dtype):
            raise LayoutError(f"{kind}: dtype is {self.dtype!r}, but must be a torch.dtype")


@dataclass(frozen=True)
class FullAttentionSpec(LayerSpec):
    """Keys and values of every token: a page is `(2, block_size, num_kv_heads, head_dim)`.

    Raises `LayoutError` for a size below 1 or a dtype that is none of torch's.
    """

    block_size: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype

    def __post_init__(self) -> None:
        """Checks the fields, so that a spec that exists is a valid one."""
        self._check(
            block_size=self.block_size, num_kv_heads=self.num_kv_heads, head_dim=self.head_dim
        )

    @property
    def page_shape(self) -> tuple[int, ...]:
        """`(2, block_size, num_kv_heads, head_dim)`: keys, then values."""
        return (2, self.block_size, self.num_kv_heads, self.head_dim)

    def layer_view(self, pages: torch.Tensor) -> torch.Tensor:
        """`(2, num_blocks, block_size, num_kv_heads, head_dim)`, as attention backends want it.

        `view[0]` are the keys, `view[1]` the values.
        """
        return pages.transpose(0, 1)
