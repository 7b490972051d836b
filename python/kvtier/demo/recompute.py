"""The judge: computes a turn from nothing and compares it with the restored one, bit by bit."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kvtier.demo.decoder import Decoder
from kvtier.torch import BlockTables, KVCache, TableGroup

__all__ = ["Recomputation", "Recomputer", "first_byte_difference"]


@dataclass(frozen=True)
class Recomputation:
    """How a turn comes out without any reuse, and where the restored one differs."""

    ttft_s: float
    token_difference: str | None
    byte_difference: str | None


class Recomputer:
    """Runs turns in a KV cache of its own, which is cleared before each."""

    def __init__(self, decoder: Decoder, kv_cache: KVCache, tile: int) -> None:
        """`kv_cache` must hold the longest turn; `tile` is that of the restored run."""
        self._decoder = decoder
        self._kv_cache = kv_cache
        self._tile = tile
        table = TableGroup(kv_cache.groups[0].block_size, kv_cache.num_blocks)
        self._tables = BlockTables([table], 1, tile, kv_cache.device)
        self._tables.append(0, [range(kv_cache.num_blocks)])

    def check(
        self,
        prompt: Sequence[int],
        tokens: Sequence[int],
        kv_cache: KVCache,
        block_ids: Sequence[int],
    ) -> Recomputation:
        """Recomputes the answer `tokens` to `prompt` and compares it.

        `block_ids` are the blocks of the restored turn in `kv_cache`, still held. All bytes of
        all full blocks are compared: what was restored and what was computed behind it.
        """
        for tensor in self._kv_cache.canonical.tensors:
            tensor.zero_()
        if self._kv_cache.device.type == "cuda":
            torch.cuda.synchronize(self._kv_cache.device)
        began = time.perf_counter()
        logits = self._decoder.prefill(prompt, 0, self._tile, self._kv_cache, self._tables, 0)
        again = [int(logits.argmax())]
        ttft = time.perf_counter() - began
        for position in range(len(prompt), len(prompt) + len(tokens) - 1):
            logits = self._decoder.decode(again[-1], position, self._kv_cache, self._tables, 0)
            again.append(int(logits.argmax()))
        # The last token was answered but never fed back, so it has no KV.
        full = (len(prompt) + len(tokens) - 1) // kv_cache.groups[0].block_size
        return Recomputation(
            ttft_s=ttft,
            token_difference=_first_token_difference(tokens, again),
            byte_difference=first_byte_difference(
                kv_cache, block_ids[:full], self._kv_cache, range(full)
            ),
        )


def _first_token_difference(restored: Sequence[int], recomputed: Sequence[int]) -> str | None:
    for index, (left, right) in enumerate(zip(restored, recomputed, strict=True)):
        if left != right:
            return f"token {index} of the answer is {left}, recomputed {right}"
    return None


def first_byte_difference(
    left: KVCache, left_ids: Sequence[int], right: KVCache, right_ids: Sequence[int]
) -> str | None:
    """Names layer, block and byte of the first difference between two lists of blocks."""
    left_index = torch.tensor(list(left_ids), device=left.device)
    right_index = torch.tensor(list(right_ids), device=right.device)
    ours, theirs = left.canonical, right.canonical
    for ref, other in zip(ours.refs[0], theirs.refs[0], strict=True):
        a, b = (
            caches.tensors[part.tensor].index_select(0, index)[:, part.offset :][:, : part.nbytes]
            for caches, part, index in ((ours, ref, left_index), (theirs, other, right_index))
        )
        if not torch.equal(a, b):
            block, byte = (int(index) for index in (a != b).nonzero()[0])
            return (
                f"layer {ref.layer}, block {block}, byte {byte}: "
                f"{int(a[block, byte]) & 0xFF:#04x}, recomputed {int(b[block, byte]) & 0xFF:#04x}"
            )
    return None
