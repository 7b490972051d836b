"""The Triton kernel that moves blocks between pages and chunks.

One launch moves all blocks of a transfer and all pieces of a block. Chunks lie in pinned host
memory, which the GPU reads and writes in place, or in a staging buffer on the device. Under
`TRITON_INTERPRET=1` the same code runs on CPU tensors.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["copy_blocks"]


@triton.jit  # type: ignore[untyped-decorator]
def copy_blocks(  # type: ignore[no-untyped-def]
    moves,
    pieces,
    chunks,
    num_moves,
    num_pieces,
    slot_bytes,
    block_bytes,
    TO_SLOTS: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    WORDS: tl.constexpr,
):
    """Program `i` of `n` makes every `n`-th of the `num_moves * num_pieces` copies.

    `moves` is int64 `(num_moves, 4)`: block, slot in `chunks`, position, and the place by which
    ranks take turns. `pieces` is int64 `(num_pieces, 6)`: address of block 0, bytes from block to
    block, bytes, offset in a block of the chunk, turns, turn. `chunks` is an address. All
    addresses and sizes are multiples of `ALIGNMENT`, which is 16, 4 or 1.
    """
    word_bytes: tl.constexpr = 8 if ALIGNMENT == 16 else ALIGNMENT
    if word_bytes == 8:
        word = tl.int64
    elif word_bytes == 4:
        word = tl.int32
    else:
        word = tl.int8
    lane = tl.arange(0, WORDS)
    job = tl.program_id(0).to(tl.int64)
    while job < num_moves * num_pieces:
        move = moves + (job // num_pieces) * 4
        piece = pieces + (job % num_pieces) * 6
        page = tl.load(piece) + tl.load(move) * tl.load(piece + 1)
        chunk = (
            chunks
            + tl.load(move + 1) * slot_bytes
            + tl.load(move + 2) * block_bytes
            + tl.load(piece + 3)
        )
        words = tl.load(piece + 2) // word_bytes
        if TO_SLOTS:
            mine = tl.load(move + 3) % tl.load(piece + 4) == tl.load(piece + 5)
            words *= mine.to(tl.int64)  # nothing where it is another rank's turn
            source = page.to(tl.pointer_type(word), bitcast=True)
            target = chunk.to(tl.pointer_type(word), bitcast=True)
        else:
            source = chunk.to(tl.pointer_type(word), bitcast=True)
            target = page.to(tl.pointer_type(word), bitcast=True)
        # What the compiler can not see in loaded numbers, and needs for its widest accesses.
        source = tl.multiple_of(source, ALIGNMENT)
        target = tl.multiple_of(target, ALIGNMENT)
        words = tl.multiple_of(words, ALIGNMENT // word_bytes)
        start = words * 0
        while start < words:
            at = tl.multiple_of(start, WORDS) + lane
            tl.store(target + at, tl.load(source + at, mask=at < words), mask=at < words)
            start += WORDS
        job += tl.num_programs(0)
