"""Copies blocks between KV cache tensors in host memory and slots, fragment by fragment.

Each fragment of `layout` is a pair of strided views over the tensor and over the region, with an
item of `nbytes` bytes; one indexed assignment moves it for all blocks of a transfer. NumPy copies
whole items and leaves the interpreter's lock meanwhile.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from kvtier._kvtier import Region
from kvtier.errors import TransferError
from kvtier.integrations.vllm.layout import Fragment, SlotLayout

__all__ = ["HostCopies"]

_Bytes: TypeAlias = NDArray[np.void]


class HostCopies:
    """The copies of one group. Ids are vLLM's; one that does not exist raises `IndexError`."""

    def __init__(
        self,
        region: Region,
        layout: SlotLayout,
        tensors: Sequence[NDArray[np.int8]],
        fragments: Sequence[Fragment],
    ) -> None:
        """`tensors` are int8 of shape `(num_blocks, page_bytes)`; views of them are kept.

        Raises `TransferError` for one that has another shape.
        """
        self._blocks_per_chunk = layout.blocks_per_chunk
        self._pairs: list[tuple[Fragment, _Bytes, _Bytes]] = []
        slots: NDArray[np.uint8] = np.asarray(region)
        for fragment in fragments:
            tensor = tensors[fragment.tensor]
            if tensor.ndim != 2 or tensor.strides[1] != 1:
                raise TransferError(
                    f"tensor {fragment.tensor} has the shape {tensor.shape} and the strides "
                    f"{tensor.strides}, but must be (num_blocks, page_bytes) with contiguous rows"
                )
            item = np.dtype((np.void, fragment.nbytes))
            in_blocks = np.lib.stride_tricks.as_strided(
                tensor[:, fragment.block_offset :].view(np.uint8)[:, : fragment.nbytes],
                (tensor.shape[0], fragment.count, fragment.nbytes),
                (tensor.strides[0], fragment.block_stride, 1),
            )
            in_slots = np.lib.stride_tricks.as_strided(
                slots[:, fragment.slot_offset :][:, : fragment.nbytes],
                (layout.slots, layout.blocks_per_chunk, fragment.count, fragment.nbytes),
                (slots.strides[0], fragment.chunk_stride, fragment.slot_stride, 1),
            )
            self._pairs.append(
                (fragment, in_blocks.view(item)[..., 0], in_slots.view(item)[..., 0])
            )

    def store(self, blocks: NDArray[np.int64], slots: NDArray[np.int64], first: int) -> int:
        """Blocks to slots; returns the bytes it copied, this rank's turns only.

        Block `i` is at place `first + i`, counted over the chunks of `slots`.
        """
        slots, places = self._places(len(blocks), slots, first)
        copied = 0
        for fragment, in_blocks, in_slots in self._pairs:
            of_turn = slice(None)
            if fragment.turns > 1:
                numbers = slots * self._blocks_per_chunk + places
                of_turn = numbers % fragment.turns == fragment.turn
            source = in_blocks[blocks[of_turn]]
            in_slots[slots[of_turn], places[of_turn]] = source
            copied += source.nbytes
        return copied

    def load(self, blocks: NDArray[np.int64], slots: NDArray[np.int64], first: int) -> int:
        """Slots to blocks; returns the bytes it copied."""
        slots, places = self._places(len(blocks), slots, first)
        copied = 0
        for _, in_blocks, in_slots in self._pairs:
            source = in_slots[slots, places]
            in_blocks[blocks] = source
            copied += source.nbytes
        return copied

    def _places(
        self, blocks: int, slots: NDArray[np.int64], first: int
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The slot, and the place in its chunk, of every block."""
        places = np.arange(first, first + blocks)
        return slots[places // self._blocks_per_chunk], places % self._blocks_per_chunk
