import random
from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F

from kvtier.demo.decoder import Decoder, DecoderConfig
from kvtier.demo.options import ModelSizes
from kvtier.demo.workload import VOCABULARY
from kvtier.errors import LayoutError
from kvtier.torch import BlockTables, KVCache, TableGroup, allocate_kv_cache

BLOCK, TILE = 4, 16
SMALL = DecoderConfig(
    layers=3, d_model=64, heads=4, kv_heads=2, ffn=96, vocabulary=VOCABULARY, max_tokens=256
)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Small products gain nothing from threads, and lose much on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Paged:
    """A decoder with a KV cache whose blocks are given out in random order."""

    def __init__(self, config: DecoderConfig, tokens: int, seed: int = 0) -> None:
        self.decoder = Decoder(config)
        self.blocks = list(range(2 * tokens // BLOCK))
        random.Random(seed).shuffle(self.blocks)
        self.cache: KVCache = allocate_kv_cache(config.kv_specs(BLOCK), len(self.blocks), "cpu")
        self.tables = BlockTables([TableGroup(BLOCK, len(self.blocks))], 1, TILE, "cpu")
        self.tables.append(0, [self.blocks])

    def answer(self, prompt: list[int], start: int, count: int) -> tuple[torch.Tensor, list[int]]:
        """Logits of every answered position `(count, vocabulary)`, and the greedy tokens."""
        logits = [self.decoder.prefill(prompt, start, TILE, self.cache, self.tables, 0)]
        tokens = [int(logits[0].argmax())]
        for position in range(len(prompt), len(prompt) + count - 1):
            logits.append(self.decoder.decode(tokens[-1], position, self.cache, self.tables, 0))
            tokens.append(int(logits[-1].argmax()))
        return torch.stack(logits), tokens


def prompt_of(length: int, seed: int = 5) -> list[int]:
    return random.Random(seed).choices(range(256), k=length)


def plain_logits(decoder: Decoder, tokens: list[int]) -> torch.Tensor:
    """Textbook full attention over the whole sequence: no cache, no pages, no tiles."""
    config, count = decoder.config, len(tokens)
    half = config.head_dim // 2
    rates = config.rope_base ** (-torch.arange(half, dtype=torch.float64) / half)
    turns = torch.polar(torch.ones(()).double(), torch.arange(count)[:, None] * rates)

    def rotate(x: torch.Tensor) -> torch.Tensor:
        pairs = torch.complex(x[..., :half].double(), x[..., half:].double()) * turns[:, None]
        return torch.cat([pairs.real, pairs.imag], dim=-1).float()

    def norm(x: torch.Tensor) -> torch.Tensor:
        return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt()

    hidden = decoder._embedding[torch.tensor(tokens)]
    for layer in decoder._layers:
        width = config.kv_heads * config.head_dim
        q, k, v = torch.split(norm(hidden) @ layer.qkv.T, [config.d_model, width, width], dim=-1)
        q = rotate(q.reshape(count, config.heads, -1))
        k = rotate(k.reshape(count, config.kv_heads, -1))
        group = config.heads // config.kv_heads
        k = k.repeat_interleave(group, dim=1)
        v = v.reshape(count, config.kv_heads, -1).repeat_interleave(group, dim=1)
        scores = torch.einsum("qhd,khd->hqk", q, k) / config.head_dim**0.5
        future = torch.ones(count, count).triu(1).bool()
        weights = scores.masked_fill(future, -torch.inf).softmax(-1)
        mixed = torch.einsum("hqk,khd->qhd", weights, v).reshape(count, -1)
        hidden = hidden + mixed @ layer.out.T
        gate, up = (norm(hidden) @ layer.gate_up.T).chunk(2, dim=-1)
        hidden = hidden + (F.silu(gate) * up) @ layer.down.T
    return norm(hidden) @ decoder._unembedding.T


@pytest.mark.parametrize("length", [1, TILE - 1, TILE, 2 * TILE + 3])
def test_paged_attention_is_plain_full_attention(length: int) -> None:
    paged = Paged(SMALL, 128)
    prompt = prompt_of(length)
    logits, tokens = paged.answer(prompt, 0, 6)
    expected = plain_logits(paged.decoder, prompt + tokens)[length - 1 : -1]
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("reused_tiles", [1, 3, 5])
def test_reuse_of_tiles_is_bit_identical(reused_tiles: int) -> None:
    prompt = prompt_of(5 * TILE + 7)
    whole, part = Paged(SMALL, 128, seed=1), Paged(SMALL, 128, seed=2)
    logits, tokens = whole.answer(prompt, 0, 8)
    count = reused_tiles * TILE // BLOCK
    for source, target in zip(
        whole.cache.canonical.tensors, part.cache.canonical.tensors, strict=True
    ):
        target[part.blocks[:count]] = source[whole.blocks[:count]]
    again, same_tokens = part.answer(prompt, reused_tiles * TILE, 8)
    assert same_tokens == tokens
    assert torch.equal(again, logits)
    full = (len(prompt) + 7) // BLOCK
    for left, right in zip(
        whole.cache.canonical.tensors, part.cache.canonical.tensors, strict=True
    ):
        assert torch.equal(left[whole.blocks[:full]], right[part.blocks[:full]])


def test_one_wrong_byte_changes_the_output() -> None:
    """With the demo's default sizes: any wrong byte changes logits, a high one the words."""
    sizes = ModelSizes()
    config = DecoderConfig(
        layers=sizes.layers,
        d_model=sizes.d_model,
        heads=sizes.heads,
        kv_heads=sizes.kv_heads,
        ffn=sizes.ffn,
        vocabulary=VOCABULARY,
        max_tokens=512,
    )
    paged = Paged(config, 256)
    reused = 8 * TILE
    prompt = prompt_of(reused + 60)
    logits, tokens = paged.answer(prompt, 0, 12)
    assert paged.answer(prompt, reused, 12)[1] == tokens  # nothing wrong yet

    chooser = random.Random(7)
    for _ in range(10):
        page = paged.cache.canonical.tensors[chooser.randrange(config.layers)]
        page = page[paged.blocks[chooser.randrange(reused // BLOCK)]]
        elements = page.view(torch.float32)
        # Byte 1 of a little-endian float32 is mantissa: a change of less than a percent.
        mild = 4 * chooser.randrange(elements.numel()) + 1
        page[mild] ^= 0x11
        changed, _ = paged.answer(prompt, reused, 12)
        assert not torch.equal(changed, logits)
        page[mild] ^= 0x11
        # Byte 3 is exponent. A small value (they are the second half of a page) gets huge.
        values = elements[elements.numel() // 2 :]
        small = values.abs().lt(2).nonzero().view(-1)
        wild = 4 * int(elements.numel() // 2 + small[chooser.randrange(len(small))]) + 3
        page[wild] ^= 0x40
        _, words = paged.answer(prompt, reused, 12)
        assert words != tokens
        page[wild] ^= 0x40
    restored, _ = paged.answer(prompt, reused, 12)
    assert torch.equal(restored, logits)


def test_prefill_refuses_what_would_break_the_tile_grid() -> None:
    paged = Paged(SMALL, 64)
    for start in (1, TILE + 1, 2 * TILE, -TILE):
        with pytest.raises(LayoutError, match=f"can not start at {start}"):
            paged.answer(prompt_of(2 * TILE), start, 1)
    with pytest.raises(LayoutError, match="position 256 is behind the last one, 255"):
        paged.decoder.decode(1, 256, paged.cache, paged.tables, 0)
