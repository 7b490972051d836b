"""A decoder-only transformer on paged KV cache: GQA, RoPE, RMSNorm, SwiGLU.

Its weights are random but seeded, so it needs no download and is as sensitive to its KV cache
as a trained one; what it says means nothing. It reads and writes KV through block tables only.

Same bits by construction. The low bits of a matrix product depend on its shape, so the same
token computed in another batch can get other bytes in its KV cache. `prefill` therefore works
in tiles of `tile` tokens, aligned to the start of the prompt: whatever was restored before,
tile `i` is computed with the same shapes and from the same bytes. Only the KV of full tiles
may be published; what `decode` writes, one token at a time, is recomputed by the next turn.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from kvtier.errors import LayoutError
from kvtier.torch import BlockTables, FullAttentionSpec, KVCache

__all__ = ["Decoder", "DecoderConfig"]

_QK_GAIN = 1.5
"""Sharpens attention (scores with a deviation of 2 to 3), so that single positions matter."""


@dataclass(frozen=True)
class DecoderConfig:
    """Everything that decides the weights and the KV layout; float32 throughout."""

    layers: int
    d_model: int
    heads: int
    kv_heads: int
    ffn: int
    vocabulary: int
    max_tokens: int
    seed: int = 0
    rope_base: float = 10_000.0

    @property
    def head_dim(self) -> int:
        """Elements of one head."""
        return self.d_model // self.heads

    def layer_names(self) -> list[str]:
        """Names of the layers in the KV cache, first to last."""
        return [f"layers.{index}" for index in range(self.layers)]

    def kv_specs(self, block_size: int) -> dict[str, FullAttentionSpec]:
        """The KV cache spec of every layer, for blocks of `block_size` tokens."""
        spec = FullAttentionSpec(block_size, self.kv_heads, self.head_dim, torch.float32)
        return dict.fromkeys(self.layer_names(), spec)


@dataclass(frozen=True)
class _Layer:
    """Weights of one layer; projections that share their input are one matrix."""

    qkv: torch.Tensor
    out: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor
    norm_attention: torch.Tensor
    norm_ffn: torch.Tensor


class Decoder:
    """Runs one request at a time out of a row of the block tables. Not for several threads."""

    def __init__(self, config: DecoderConfig, device: torch.device | str = "cpu") -> None:
        """Draws the weights on the CPU, so that every device has the same ones."""
        self.config = config
        self.device = torch.device(device)
        draw = torch.Generator().manual_seed(config.seed)

        def matrix(rows: int, columns: int, gain: float = 1.0) -> torch.Tensor:
            weight = torch.empty(rows, columns)
            weight.normal_(0.0, gain / math.sqrt(columns), generator=draw)
            return weight.to(self.device)

        d, ffn = config.d_model, config.ffn
        kv_width = config.kv_heads * config.head_dim
        ones = torch.ones(d, device=self.device)
        self._embedding = matrix(config.vocabulary, d, math.sqrt(d))
        self._layers = [
            _Layer(
                qkv=torch.cat([matrix(d + kv_width, d, _QK_GAIN), matrix(kv_width, d)]),
                out=matrix(d, d),
                gate_up=matrix(2 * ffn, d),
                down=matrix(d, ffn),
                norm_attention=ones,
                norm_ffn=ones,
            )
            for _ in range(config.layers)
        ]
        self._norm_final = ones
        self._unembedding = matrix(config.vocabulary, d)
        self._cos, self._sin = self._rope_tables()

    def _rope_tables(self) -> tuple[torch.Tensor, torch.Tensor]:
        half = self.config.head_dim // 2
        rates = self.config.rope_base ** (-torch.arange(half, dtype=torch.float64) / half)
        angles = torch.arange(self.config.max_tokens, dtype=torch.float64)[:, None] * rates
        shape = (self.config.max_tokens, 1, half)
        cos = angles.cos().to(torch.float32).view(shape)
        sin = angles.sin().to(torch.float32).view(shape)
        return cos.to(self.device), sin.to(self.device)

    def prefill(
        self,
        tokens: Sequence[int],
        start: int,
        tile: int,
        kv_cache: KVCache,
        tables: BlockTables,
        row: int,
    ) -> torch.Tensor:
        """Computes positions `start .. len(tokens)`; the KV before `start` is in the cache.

        Returns the logits `(vocabulary,)` of the last position. Raises `LayoutError` when
        `start` is not on the tile grid, nothing is left to compute, or the row of the tables
        is too short.
        """
        if start % tile or not 0 <= start < len(tokens):
            raise LayoutError(
                f"prefill of {len(tokens)} tokens can not start at {start}: it must be a "
                f"multiple of {tile} before the last token"
            )
        hidden = torch.empty(0)
        for first in range(start, len(tokens), tile):
            part = tokens[first : first + tile]
            hidden = self._forward(part, first, kv_cache, tables, row)
        return self._logits(hidden[-1])

    def decode(
        self, token: int, position: int, kv_cache: KVCache, tables: BlockTables, row: int
    ) -> torch.Tensor:
        """Computes one token at `position`; returns its logits `(vocabulary,)`."""
        return self._logits(self._forward([token], position, kv_cache, tables, row)[-1])

    @torch.inference_mode()
    def _forward(
        self,
        tokens: Sequence[int],
        first: int,
        kv_cache: KVCache,
        tables: BlockTables,
        row: int,
    ) -> torch.Tensor:
        """Runs consecutive tokens from position `first`; returns hidden `(tokens, d_model)`."""
        end = first + len(tokens)
        if end > self.config.max_tokens:
            raise LayoutError(
                f"position {end - 1} is behind the last one, {self.config.max_tokens - 1}"
            )
        block_size = kv_cache.groups[0].block_size
        covered = tables.num_blocks(row) * block_size
        if end > covered:
            raise LayoutError(f"row {row} covers {covered} positions, but {end} are needed")
        starts = torch.tensor([0, len(tokens)], dtype=torch.int32, device=self.device)
        positions = torch.arange(first, end, device=self.device)
        (table,), (slots,) = tables.step([row], starts, positions)
        where = (slots // block_size, slots % block_size)
        context = table[0, : -(-end // block_size)]
        mask = self._mask(first, end)
        cos, sin = self._cos[first:end], self._sin[first:end]
        ids = torch.tensor(tokens, dtype=torch.int64).to(self.device)
        hidden = self._embedding[ids]
        for name, layer in zip(self.config.layer_names(), self._layers, strict=True):
            view = kv_cache.view(name)
            normed = _rms_norm(hidden, layer.norm_attention)
            mixed = self._attend(normed, layer, view, where, context, end, mask, cos, sin)
            hidden = hidden + mixed
            gate, up = F.linear(_rms_norm(hidden, layer.norm_ffn), layer.gate_up).chunk(2, dim=-1)
            hidden = hidden + F.linear(F.silu(gate) * up, layer.down)
        return hidden

    def _attend(
        self,
        normed: torch.Tensor,
        layer: _Layer,
        view: torch.Tensor,
        where: tuple[torch.Tensor, torch.Tensor],
        context: torch.Tensor,
        end: int,
        mask: torch.Tensor | None,
        cos: torch.Tensor,
        sin: torch.Tensor,
    ) -> torch.Tensor:
        """Writes the new K and V to their token slots, then attends to blocks `context`."""
        count, config = normed.shape[0], self.config
        kv_heads, head_dim = config.kv_heads, config.head_dim
        widths = [config.d_model, kv_heads * head_dim, kv_heads * head_dim]
        q, k, v = torch.split(F.linear(normed, layer.qkv), widths, dim=-1)
        q = _rotate(q.view(count, config.heads, head_dim), cos, sin)
        view[0][where] = _rotate(k.view(count, kv_heads, head_dim), cos, sin)
        view[1][where] = v.view(count, kv_heads, head_dim)
        keys, values = (
            view[side].index_select(0, context).view(-1, kv_heads, head_dim)[:end].transpose(0, 1)
            for side in (0, 1)
        )
        # The query heads of one KV head become rows of one problem: K and V are never repeated.
        folded = q.transpose(0, 1).reshape(kv_heads, -1, head_dim)
        mixed = F.scaled_dot_product_attention(
            folded[None], keys[None], values[None], attn_mask=mask
        )
        mixed = mixed.view(config.heads, count, head_dim).transpose(0, 1)
        return F.linear(mixed.reshape(count, config.d_model), layer.out)

    def _mask(self, first: int, end: int) -> torch.Tensor | None:
        """Causal mask `(query heads per KV head * tokens, end)`; none for a single token."""
        count = end - first
        if count == 1:
            return None
        positions = torch.arange(end, device=self.device)
        hidden = positions[None, :] > positions[first:, None]
        mask = torch.zeros(count, end, device=self.device).masked_fill_(hidden, -math.inf)
        return mask.repeat(self.config.heads // self.config.kv_heads, 1)

    @torch.inference_mode()
    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return F.linear(_rms_norm(hidden, self._norm_final), self._unembedding)


def _rms_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return F.rms_norm(x, (x.shape[-1],), weight, eps=1e-6)


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary embedding of `(tokens, heads, head_dim)`, halves paired as in Llama."""
    low, high = x.chunk(2, dim=-1)
    return torch.cat([low * cos - high * sin, high * cos + low * sin], dim=-1)
