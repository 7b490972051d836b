"""CPU tensors to slots and back, beside memcpy on as many threads."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import numpy as np
import torch

from kvtier._kvtier import Region
from kvtier.bench.figures import Figure, alternate, compared
from kvtier.torch import FullAttentionSpec, TransferEngine, allocate_kv_cache, region_tensor

__all__ = ["measure_host"]

_LAYERS = 8
_BLOCKS_PER_CHUNK = 4
_TARGET = 0.9


def measure_host(size: int, rounds: int) -> Iterator[Figure]:
    """Yields store and load for pages from 4 KiB to 1 MiB, `size` bytes at a time."""
    for page_kib in (4, 16, 64, 1024):
        yield from _one_page_size(page_kib << 10, size, rounds)


def _one_page_size(page_bytes: int, size: int, rounds: int) -> Iterator[Figure]:
    spec = FullAttentionSpec(16, 1, page_bytes // (2 * 16 * 2), torch.bfloat16)
    chunk_bytes = _LAYERS * _BLOCKS_PER_CHUNK * page_bytes
    chunks = max(1, size // chunk_bytes)
    specs = {f"layer{index}": spec for index in range(_LAYERS)}
    cache = allocate_kv_cache(specs, chunks * _BLOCKS_PER_CHUNK, "cpu")
    for tensor in cache.canonical:
        tensor.fill_(1)
    region = Region(chunks, chunk_bytes, prefault_threads=torch.get_num_threads())
    blocks = np.random.default_rng(0).permutation(chunks * _BLOCKS_PER_CHUNK)
    ids = blocks.reshape(chunks, _BLOCKS_PER_CHUNK)
    slots = np.arange(chunks)
    source = torch.ones(chunks * chunk_bytes, dtype=torch.uint8)
    rows = region_tensor(region).view(-1)[: source.numel()]
    name = f"{page_bytes >> 10}KiB"
    with TransferEngine(region, cache, _BLOCKS_PER_CHUNK) as engine:

        def rate(run: Callable[[], object]) -> Callable[[], float]:
            def take() -> float:
                began = time.perf_counter()
                run()
                return source.numel() / (time.perf_counter() - began) / 1e9

            return take

        for verb, ours, plain in (
            ("store", lambda: engine.wait(engine.store(ids, slots)), lambda: rows.copy_(source)),
            ("load", lambda: engine.wait(engine.load(ids, slots)), lambda: source.copy_(rows)),
        ):
            mine, theirs = alternate(rounds, rate(ours), rate(plain))
            yield compared(
                f"transfer.{verb}.{name}.cpu",
                "GB/s",
                mine,
                reference="memcpy",
                theirs=theirs,
                target=_TARGET,
            )
