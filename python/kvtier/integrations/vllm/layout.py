"""Which byte of a worker's block lies where in a slot, for every layout that vLLM knows.

A slot holds one chunk of one group: `[block of the chunk][rank][tensor][page]`. Groups of a hybrid
model overlay each other in the same tensors, so they use the same places of different slots. Two
kinds of pages:

* direct: the page of this rank as it is in its KV cache. Every rank has a part of each block; with
  a replicated layout (MLA) all ranks hold the same bytes, and there is one part.
* canonical: the page that a rank with all heads would have. Ranks write their fragments into one
  part. Where several hold the same bytes they take turns, by the block's place in the region.

How large a slot is follows from vLLM's config alone, so the scheduler and every rank work out the
same region. What a rank moves follows from its KV cache too, and `kvtier.torch` moves it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kvtier.errors import ConfigError, LayoutError
from kvtier.torch.chunk_layout import ChunkLayout, GroupLayout, Piece

__all__ = ["CHUNK_ORDER", "SlotLayout", "rank_layout", "slot_layout"]

CHUNK_ORDER = "block,rank,tensor,page"
"""Of the bytes in a chunk, for the identity of a store."""
_PAGE = 4096


@dataclass(frozen=True)
class SlotLayout:
    """The region of one engine."""

    slots: int
    slot_bytes: int
    blocks_per_chunk: int


def slot_layout(config: Any, host_bytes: int) -> SlotLayout:
    """The region for vLLM's `OffloadingConfig` in `host_bytes` of host memory.

    Raises `ConfigError` when not one chunk fits.
    """
    blocks_per_chunk = config.cache.blocks_per_chunk
    slot_bytes = -(-_block_bytes(config) * blocks_per_chunk // _PAGE) * _PAGE
    if not slot_bytes:
        raise ConfigError("vLLM's KV cache has blocks of 0 bytes: there is nothing to offload")
    if host_bytes < slot_bytes:
        raise ConfigError(
            f"cpu_bytes_to_use is {host_bytes}, but one chunk of all ranks takes {slot_bytes} bytes"
        )
    return SlotLayout(host_bytes // slot_bytes, slot_bytes, blocks_per_chunk)


def rank_layout(config: Any, kv_caches: Any) -> ChunkLayout:
    """What this rank moves of each group's blocks; `kv_caches` are vLLM's `CanonicalKVCaches`.

    Raises `LayoutError` when a block needs more than the config makes room for, or a canonical
    layout was asked for that vLLM does not certify.
    """
    tensors = tuple(cache.tensor.view(torch.int8) for cache in kv_caches.tensors)
    # Layers that share a KV cache refer to the same bytes.
    groups = [list({ref.tensor_idx: ref for ref in refs}.values())
              for refs in kv_caches.group_data_refs]  # fmt: skip
    if config.canonical_layout:
        _check_certified(config, groups)
        sizes = _canonical_sizes(len(tensors), groups)
        start, room, block_bytes = 0, _block_bytes(config), sum(sizes)
    else:
        sizes = [cache.page_size_bytes for cache in kv_caches.tensors]
        room, block_bytes = config.worker_kv_bytes_per_block, _block_bytes(config)
        start = 0 if config.replicated_layout else config.parallel.rank * room
    if sum(sizes) > room:
        raise LayoutError(
            f"the KV cache has {sum(sizes)} bytes a block, but vLLM's config makes room for only "
            f"{room}"
        )
    starts = [start + sum(sizes[:number]) for number in range(len(sizes))]
    pieces = _canonical_pieces if config.canonical_layout else _page
    return ChunkLayout(
        tensors,
        tuple(
            GroupLayout(
                block_bytes,
                tuple(piece for ref in refs for piece in pieces(ref, starts[ref.tensor_idx])),
            )
            for refs in groups
        ),
    )


def _block_bytes(config: Any) -> int:
    """Bytes of one block of all ranks."""
    ranks = 1 if config.replicated_layout else config.parallel.world_size
    return int(config.worker_kv_bytes_per_block * ranks)


def _page(ref: Any, start: int) -> Iterator[Piece]:
    yield Piece(ref.tensor_idx, 0, ref.page_size_bytes, start)


def _canonical_pieces(ref: Any, start: int) -> Iterator[Piece]:
    mapping = ref.mapping
    for run in mapping.runs:
        for number in range(run.num_fragments):
            yield Piece(
                ref.tensor_idx,
                run.local_offset + number * run.local_stride,
                run.fragment_size,
                start + run.canonical_offset + number * run.canonical_stride,
                mapping.num_writers,
                mapping.writer_index,
            )


def _check_certified(config: Any, groups: Sequence[Sequence[Any]]) -> None:
    """A store that ranks of any number share must not get bytes that depend on their number."""
    refs = [ref for refs in groups for ref in refs]
    shared = config.parallel.is_parallelism_agnostic
    if any(
        ref.mapping is None or (shared and not ref.mapping.parallelism_agnostic) for ref in refs
    ):
        raise LayoutError(
            "canonical_layout was asked for, but vLLM can not certify this KV cache for it: "
            "take canonical_layout out of kv_connector_extra_config"
        )


def _canonical_sizes(tensors: int, groups: Sequence[Sequence[Any]]) -> list[int]:
    """Bytes of the canonical page of each tensor."""
    sizes = [0] * tensors
    for ref in (ref for refs in groups for ref in refs):
        sizes[ref.tensor_idx] = max(sizes[ref.tensor_idx], ref.mapping.canonical_page_size_bytes)
    return sizes
