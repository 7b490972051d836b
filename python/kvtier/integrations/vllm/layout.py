"""Which byte of a worker's block lies where in a slot, for every layout that vLLM knows.

A slot holds one chunk of one group: `[rank][tensor][block of the chunk][page]`. Groups of a hybrid
model overlay each other in the same tensors, so they use the same places of different slots. Two
kinds of pages:

* direct: the page of this rank as it is in its KV cache. Every rank has a part of the slot; with
  a replicated layout (MLA) all ranks hold the same bytes, and there is one part.
* canonical: the page that a rank with all heads would have. Ranks write their fragments into one
  part. Where several hold the same bytes they take turns, by the block's place in the region.

Sizes come from vLLM's config alone, so the scheduler and every rank work out the same region.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvtier.errors import ConfigError, LayoutError

__all__ = ["Fragment", "SlotLayout", "group_fragments", "slot_layout"]

_PAGE = 4096


@dataclass(frozen=True)
class SlotLayout:
    """The region of one engine."""

    slots: int
    slot_bytes: int
    rank_bytes: int
    """Bytes of the part of one rank."""
    blocks_per_chunk: int


@dataclass(frozen=True)
class Fragment:
    """`count` runs of `nbytes`, evenly apart, of every block of one tensor."""

    tensor: int
    nbytes: int
    count: int
    block_offset: int
    block_stride: int
    slot_offset: int
    """Of the first run of the chunk's first block, from the start of the slot."""
    slot_stride: int
    chunk_stride: int
    """Bytes in the slot from one block of the chunk to the next."""
    turns: int = 1
    """Ranks that hold these very bytes; each stores the blocks of its turn."""
    turn: int = 0


def slot_layout(config: Any, host_bytes: int) -> SlotLayout:
    """The region for vLLM's `OffloadingConfig` in `host_bytes` of host memory.

    Raises `ConfigError` when not one chunk fits.
    """
    blocks_per_chunk = config.cache.blocks_per_chunk
    rank_bytes = config.worker_kv_bytes_per_block * blocks_per_chunk
    copies = 1 if config.replicated_layout else config.parallel.world_size
    slot_bytes = -(-rank_bytes * copies // _PAGE) * _PAGE
    if not slot_bytes:
        raise ConfigError("vLLM's KV cache has blocks of 0 bytes: there is nothing to offload")
    if host_bytes < slot_bytes:
        raise ConfigError(
            f"cpu_bytes_to_use is {host_bytes}, but one chunk of all ranks takes {slot_bytes} bytes"
        )
    return SlotLayout(host_bytes // slot_bytes, slot_bytes, rank_bytes, blocks_per_chunk)


def group_fragments(
    config: Any, layout: SlotLayout, page_bytes: list[int], group_refs: list[list[Any]]
) -> list[list[Fragment]]:
    """What a transfer of one block of each group moves.

    `page_bytes` are those of each tensor, padding included; `group_refs` are vLLM's
    `CanonicalKVCacheRef`s. Raises `LayoutError` when the tensors need more than the slot has, or
    a canonical layout was asked for that vLLM can not certify.
    """
    canonical = config.canonical_layout
    sizes = _canonical_sizes(len(page_bytes), group_refs) if canonical else page_bytes
    room = layout.slot_bytes if canonical else layout.rank_bytes
    if sum(sizes) * layout.blocks_per_chunk > room:
        raise LayoutError(
            f"the KV cache has {sum(sizes)} bytes a block, but vLLM's config makes room for only "
            f"{room // layout.blocks_per_chunk}"
        )
    shared = canonical or config.replicated_layout
    start = 0 if shared else config.parallel.rank * layout.rank_bytes
    starts = []
    for size in sizes:
        starts.append(start)
        start += size * layout.blocks_per_chunk
    make = _canonical_fragments if canonical else _page_fragment
    return [
        [
            fragment
            for ref in refs
            for fragment in make(ref, starts[ref.tensor_idx], sizes[ref.tensor_idx])
        ]
        for refs in group_refs
    ]


def _page_fragment(ref: Any, start: int, size: int) -> list[Fragment]:
    nbytes = ref.page_size_bytes
    return [Fragment(ref.tensor_idx, nbytes, 1, 0, nbytes, start, nbytes, size)]


def _canonical_fragments(ref: Any, start: int, size: int) -> list[Fragment]:
    mapping = ref.mapping
    return [
        Fragment(
            tensor=ref.tensor_idx,
            nbytes=run.fragment_size,
            count=run.num_fragments,
            block_offset=run.local_offset,
            block_stride=run.local_stride,
            slot_offset=start + run.canonical_offset,
            slot_stride=run.canonical_stride,
            chunk_stride=size,
            turns=mapping.num_writers,
            turn=mapping.writer_index,
        )
        for run in mapping.runs
    ]


def _canonical_sizes(tensors: int, group_refs: list[list[Any]]) -> list[int]:
    """Bytes of the canonical page of each tensor."""
    sizes = [0] * tensors
    for ref in (ref for refs in group_refs for ref in refs):
        if ref.mapping is None:
            raise LayoutError(
                "canonical_layout was asked for, but vLLM can not certify this KV cache for it: "
                "take canonical_layout out of kv_connector_extra_config"
            )
        sizes[ref.tensor_idx] = max(sizes[ref.tensor_idx], ref.mapping.canonical_page_size_bytes)
    return sizes
