"""A KV cache whose blocks are scattered, a region, and an engine between them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from kvtier._kvtier import Region
from kvtier.torch import (
    FullAttentionSpec,
    TransferEngine,
    TransferJob,
    allocate_kv_cache,
    region_tensor,
)

__all__ = ["Paged", "paged"]

_LAYERS = 8
_BLOCKS_PER_CHUNK = 4
_BLOCK_SIZE = 16


@dataclass(frozen=True)
class Paged:
    """What the figures of one page size are taken with."""

    engine: TransferEngine
    ids: NDArray[np.int64]
    slots: NDArray[np.int64]
    rows: torch.Tensor
    """The bytes of the slots as one flat tensor."""
    nbytes: int

    def store(self) -> TransferJob:
        """Stores everything."""
        return self.engine.store(self.ids, self.slots)

    def load(self) -> TransferJob:
        """Loads everything."""
        return self.engine.load(self.ids, self.slots)


@contextlib.contextmanager
def paged(page_bytes: int, size: int, device: str) -> Iterator[Paged]:
    """About `size` bytes in pages of `page_bytes`: 8 layers, chunks of 4 blocks in random order."""
    elements = page_bytes // torch.bfloat16.itemsize
    spec = FullAttentionSpec(_BLOCK_SIZE, 1, elements // (2 * _BLOCK_SIZE), torch.bfloat16)
    chunk_bytes = _LAYERS * _BLOCKS_PER_CHUNK * page_bytes
    chunks = max(1, size // chunk_bytes)
    specs = {f"layer{index}": spec for index in range(_LAYERS)}
    cache = allocate_kv_cache(specs, chunks * _BLOCKS_PER_CHUNK, device)
    for tensor in cache.canonical.tensors:
        tensor.fill_(1)  # fresh memory is slow when it is touched first
    region = Region(chunks, chunk_bytes, prefault_threads=torch.get_num_threads())
    blocks = np.random.default_rng(0).permutation(chunks * _BLOCKS_PER_CHUNK)
    nbytes = chunks * chunk_bytes
    with TransferEngine(region, cache, _BLOCKS_PER_CHUNK) as engine:
        yield Paged(
            engine,
            blocks.reshape(chunks, _BLOCKS_PER_CHUNK),
            np.arange(chunks),
            region_tensor(region).view(-1)[:nbytes],
            nbytes,
        )
