"""Which byte of a block lies where in a chunk.

A slot holds a chunk of one group as `[block of the chunk][layer][page]`, densely from its start.
Two orders of a page:

* of this rank: the page as the spec describes it. A store can be read by the same rank of an
  engine with the same tensor-parallel size.
* parallel-agnostic: the page that a rank with all heads would have. Every rank moves its heads to
  their places in one slot that all ranks share, so a store that two ranks wrote can be read by
  four. Bytes that several ranks hold (replicated heads, MLA) are stored once: ranks take turns,
  by the block's place in the region, which all of them know.

An integration whose engine has canonical tensors and an order of its own says both with a
`ChunkLayout`, and needs no specs.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from kvtier._kvtier import Moves
from kvtier.errors import LayoutError
from kvtier.torch.canonical import CanonicalKVCaches, PageRef
from kvtier.torch.groups import CacheGroup
from kvtier.torch.layouts import Axis, Part
from kvtier.torch.specs import LayerSpec

__all__ = [
    "ChunkLayout",
    "GroupLayout",
    "Piece",
    "TensorParallel",
    "chunk_layout",
    "layout_identity",
]


@dataclass(frozen=True)
class TensorParallel:
    """A rank among those that split the heads of a model."""

    size: int
    rank: int

    def __post_init__(self) -> None:
        """Raises `LayoutError` for a rank that does not exist."""
        if self.size < 1 or not 0 <= self.rank < self.size:
            raise LayoutError(
                f"rank {self.rank} of {self.size} tensor-parallel ranks is not possible"
            )


class Piece(NamedTuple):
    """Bytes of a row of a canonical tensor, and their place in a block of the chunk."""

    tensor: int
    offset: int
    nbytes: int
    slot_offset: int
    turns: int = 1
    """Ranks that hold these very bytes; each stores every `turns`-th block."""
    turn: int = 0


@dataclass(frozen=True)
class GroupLayout:
    """What a block of one group is in a chunk."""

    block_bytes: int
    pieces: tuple[Piece, ...]

    def moved_bytes(self, moves: Moves, blocks_per_chunk: int) -> int:
        """Bytes that this rank moves: of stores only its turns."""
        turns = {(piece.turns, piece.turn) for piece in self.pieces}
        if not moves.to_slots or turns <= {(1, 0)}:
            return len(moves) * sum(piece.nbytes for piece in self.pieces)
        places = moves.slots * blocks_per_chunk + moves.positions
        blocks = {turn: int((places % turn[0] == turn[1]).sum()) for turn in turns}
        return sum(blocks[piece.turns, piece.turn] * piece.nbytes for piece in self.pieces)


@dataclass(frozen=True)
class ChunkLayout:
    """Canonical tensors, and where their bytes lie in chunks: all that a transfer needs."""

    tensors: tuple[torch.Tensor, ...]
    """int8 `(num_blocks, bytes)`, rows contiguous, any row stride."""
    groups: tuple[GroupLayout, ...]

    def __post_init__(self) -> None:
        """Raises `LayoutError`: tensors that are not alike, pieces that do not fit or overlap."""
        if not self.tensors or not self.groups:
            raise LayoutError(
                f"{len(self.tensors)} tensors and {len(self.groups)} groups: there must be at "
                "least one of each"
            )
        for number, tensor in enumerate(self.tensors):
            self._check_tensor(number, tensor)
        for number, group in enumerate(self.groups):
            self._check_group(number, group)

    @property
    def num_blocks(self) -> int:
        """Rows of each tensor."""
        return int(self.tensors[0].shape[0])

    @property
    def device(self) -> torch.device:
        """Where the tensors lie."""
        return self.tensors[0].device

    @property
    def block_bytes(self) -> int:
        """Bytes of a block of the widest group."""
        return max(group.block_bytes for group in self.groups)

    def _check_tensor(self, number: int, tensor: torch.Tensor) -> None:
        rows = tensor.ndim == 2 and tensor.stride(1) == 1 and tensor.stride(0) >= tensor.shape[1]
        if tensor.dtype != torch.int8 or not rows:
            raise LayoutError(
                f"tensor {number} is {tensor.dtype} of shape {tuple(tensor.shape)} with strides "
                f"{tensor.stride()}, but must be int8 (num_blocks, bytes) with contiguous rows"
            )
        if (tensor.shape[0], tensor.device) != (self.num_blocks, self.device):
            raise LayoutError(
                f"tensor {number} has {tensor.shape[0]} blocks on {tensor.device}, but tensor 0 "
                f"{self.num_blocks} on {self.device}"
            )

    def _check_group(self, number: int, group: GroupLayout) -> None:
        for piece in group.pieces:
            if not 0 <= piece.tensor < len(self.tensors):
                raise LayoutError(f"group {number}: there is no tensor {piece.tensor}")
            row_bytes = self.tensors[piece.tensor].shape[1]
            if (
                piece.nbytes < 1
                or not 0 <= piece.offset <= row_bytes - piece.nbytes
                or not 0 <= piece.slot_offset <= group.block_bytes - piece.nbytes
                or not 0 <= piece.turn < piece.turns
            ):
                raise LayoutError(
                    f"group {number}: {piece} does not fit into rows of {row_bytes} bytes and "
                    f"blocks of {group.block_bytes}"
                )
        in_rows = sorted((piece.tensor, piece.offset, piece.nbytes) for piece in group.pieces)
        in_block = sorted((0, piece.slot_offset, piece.nbytes) for piece in group.pieces)
        for (left, start, nbytes), (right, after, _) in itertools.chain(
            itertools.pairwise(in_rows), itertools.pairwise(in_block)
        ):
            if left == right and after < start + nbytes:
                raise LayoutError(f"group {number}: two pieces overlap at byte {after}")


def chunk_layout(
    caches: CanonicalKVCaches, tensor_parallel: TensorParallel | None = None
) -> ChunkLayout:
    """The layout of every group; parallel-agnostic with `tensor_parallel`.

    Raises `LayoutError` when the ranks can not hold the shards that a layer names.
    """
    layouts = []
    for group, refs in zip(caches.groups, caches.refs, strict=True):
        pieces: list[Piece] = []
        base = 0
        for layer in group.specs:
            own = [ref for ref in refs if ref.layer == layer]
            if tensor_parallel is None:
                pieces += [
                    Piece(ref.tensor, ref.offset, ref.nbytes, base + ref.page_offset) for ref in own
                ]
                base += group.specs[layer].page_bytes
            else:
                pieces += _agnostic_pieces(group, layer, own, base, tensor_parallel)
                base += group.blocks_per_kv_block * _full_spec_bytes(group.kernel_spec(layer))
        layouts.append(GroupLayout(base, tuple(_joined(pieces))))
    return ChunkLayout(caches.tensors, tuple(layouts))


def layout_identity(
    groups: Sequence[CacheGroup],
    blocks_per_chunk: int,
    tensor_parallel: TensorParallel | None = None,
    *,
    agnostic: bool = False,
) -> dict[str, Any]:
    """Everything that decides which byte of a chunk lies where, as plain JSON values.

    For the namespace of a store: data with another identity must not be served. It does not name
    how pages lie in memory, which a chunk does not depend on, nor the layers' names, only their
    order. With `agnostic`, it is the same for every tensor-parallel size.
    """

    def part_identity(part: Part) -> list[Any]:
        sizes = dict(part.sizes)
        if agnostic:
            sizes[Axis.HEAD] = sizes.get(Axis.HEAD, 1) * part.shards
        axes = [axis for axis in part.page_axes if axis in sizes]
        return [
            str(part.dtype).removeprefix("torch."),
            "".join(axis.value for axis in axes),
            *(sizes[axis] for axis in axes),
        ]

    rank = tensor_parallel or TensorParallel(1, 0)
    return {
        "order": "block,layer,page",
        "blocks_per_chunk": blocks_per_chunk,
        "tensor_parallel": None if agnostic else [rank.size, rank.rank],
        "groups": [
            {
                "block_size": group.block_size,
                "kernel_block_size": group.kernel_block_size,
                "layers": [
                    list(map(part_identity, group.kernel_spec(layer).parts))
                    for layer in group.specs
                ],
            }
            for group in groups
        ],
    }


def _full_part(part: Part) -> Part:
    """The part of a rank that holds all heads."""
    if part.shards == 1:
        return part
    sizes = {**part.sizes, Axis.HEAD: part.sizes[Axis.HEAD] * part.shards}
    return replace(part, sizes=sizes, shards=1)


def _full_ranges(spec: LayerSpec) -> list[tuple[int, int]]:
    """First byte and end of each part in the page of a rank that holds all heads."""
    ranges: list[tuple[int, int]] = []
    end = 0
    for part in map(_full_part, spec.parts):
        start = -(-end // part.dtype.itemsize) * part.dtype.itemsize
        end = start + part.nbytes
        ranges.append((start, end))
    return ranges


def _full_spec_bytes(spec: LayerSpec) -> int:
    return _full_ranges(spec)[-1][1]


def _agnostic_pieces(
    group: CacheGroup, layer: str, refs: Sequence[PageRef], base: int, parallel: TensorParallel
) -> Iterator[Piece]:
    spec = group.kernel_spec(layer)
    full_bytes = _full_spec_bytes(spec)
    for kernel in range(group.blocks_per_kv_block):
        for part, (start, _), (full_start, _) in zip(
            spec.parts, spec.part_ranges(), _full_ranges(spec), strict=True
        ):
            replicas, rest = divmod(parallel.size, part.shards)
            if rest or not replicas:
                raise LayoutError(
                    f"layer {layer!r} is in {part.shards} shards, which {parallel.size} "
                    f"tensor-parallel ranks can not hold evenly"
                )
            # Consecutive ranks hold the same heads where there are more ranks than heads.
            shard, turn = divmod(parallel.rank, replicas)
            for offset, full_offset, nbytes in _fragments(part, shard):
                yield from _located(
                    refs,
                    kernel * spec.page_bytes + start + offset,
                    nbytes,
                    base + kernel * full_bytes + full_start + full_offset,
                    replicas,
                    turn,
                )


def _fragments(part: Part, shard: int) -> Iterator[tuple[int, int, int]]:
    """`(offset in this rank's part, offset in the full part, bytes)`: whole runs of heads."""
    if part.shards == 1:
        yield 0, 0, part.nbytes
        return
    outside = part.page_axes[: part.page_axes.index(Axis.HEAD)]
    count = math.prod(part.sizes[axis] for axis in outside)
    nbytes = part.nbytes // count
    for number in range(count):
        yield number * nbytes, (number * part.shards + shard) * nbytes, nbytes


def _located(
    refs: Sequence[PageRef], page_offset: int, nbytes: int, slot_offset: int, turns: int, turn: int
) -> Iterator[Piece]:
    """The pieces of bytes `page_offset .. + nbytes` of a page."""
    for ref in refs:
        first = max(page_offset, ref.page_offset)
        last = min(page_offset + nbytes, ref.page_offset + ref.nbytes)
        if first < last:
            yield Piece(
                ref.tensor,
                ref.offset + first - ref.page_offset,
                last - first,
                slot_offset + first - page_offset,
                turns,
                turn,
            )


def _joined(pieces: Sequence[Piece]) -> list[Piece]:
    """Joins pieces that follow each other both in a row and in the chunk."""
    joined: list[Piece] = []
    for piece in sorted(pieces, key=lambda piece: piece.slot_offset):
        last = joined[-1] if joined else None
        if (
            last is not None
            and last.tensor == piece.tensor
            and last.offset + last.nbytes == piece.offset
            and last.slot_offset + last.nbytes == piece.slot_offset
            and last[4:] == piece[4:]
        ):
            joined[-1] = last._replace(nbytes=last.nbytes + piece.nbytes)
        else:
            joined.append(piece)
    return joined
