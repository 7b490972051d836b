"""The engine's side of the GPU pool: who holds which block, and what a block contains.

A block is in exactly one of three states:

* held: one or more references; never reused.
* cached: no reference, but its content is known by hash; reusable, oldest first.
* blank: no reference and no known content; reused before any cached block.

Every operation is O(1) a block. Not safe from several threads: it belongs to the scheduler.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from kvtier.errors import ConfigError, InvariantError, KeyStateError, PoolExhaustedError

__all__ = ["BlockPool", "BlockPoolStats"]


@dataclass(frozen=True)
class BlockPoolStats:
    """Counters since the pool was made, in blocks."""

    hits: int
    misses: int
    evictions: int
    published: int


class BlockPool:
    """Hands out the block ids `0 .. num_blocks - 1` and finds cached prefixes again."""

    def __init__(self, num_blocks: int) -> None:
        """Raises `ConfigError` for less than one block."""
        if num_blocks < 1:
            raise ConfigError(f"a block pool of {num_blocks} blocks is not possible")
        self._refs = [0] * num_blocks
        self._hash_of: list[bytes | None] = [None] * num_blocks
        self._block_of: dict[bytes, int] = {}
        self._blank = list(range(num_blocks - 1, -1, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._hits = self._misses = self._evictions = self._published = 0

    @property
    def num_blocks(self) -> int:
        """Size of the pool."""
        return len(self._refs)

    @property
    def num_free(self) -> int:
        """Blocks that `allocate` can give: blank and cached ones."""
        return len(self._blank) + len(self._cached)

    @property
    def num_cached(self) -> int:
        """Blocks whose content is known, held ones included."""
        return len(self._block_of)

    @property
    def stats(self) -> BlockPoolStats:
        """A snapshot of the counters."""
        return BlockPoolStats(self._hits, self._misses, self._evictions, self._published)

    def allocate(self, count: int) -> list[int]:
        """Returns `count` blocks with one reference each and no known content.

        Blank blocks go first, then cached ones in the order they were freed. Raises
        `PoolExhaustedError`, with nothing changed, when there are not enough.
        """
        if count < 0:
            raise ConfigError(f"can not allocate {count} blocks")
        if count > self.num_free:
            raise PoolExhaustedError(
                f"{count} blocks wanted, but only {self.num_free} of {self.num_blocks} are free; "
                f"make the GPU pool larger or run fewer requests at once"
            )
        return [self._take() for _ in range(count)]

    def _take(self) -> int:
        if self._blank:
            block = self._blank.pop()
        else:
            block, _ = self._cached.popitem(last=False)
            known, self._hash_of[block] = self._hash_of[block], None
            if known is not None:  # always: only published blocks enter `_cached`
                del self._block_of[known]
            self._evictions += 1
        self._refs[block] = 1
        return block

    def match_prefix(self, hashes: Sequence[bytes]) -> list[int]:
        """Returns the blocks of the longest cached prefix, each with one more reference."""
        matched: list[int] = []
        for block_hash in hashes:
            block = self._block_of.get(block_hash)
            if block is None:
                break
            if self._refs[block] == 0:
                del self._cached[block]
            self._refs[block] += 1
            matched.append(block)
        self._hits += len(matched)
        self._misses += len(hashes) - len(matched)
        return matched

    def publish(self, block_ids: Sequence[int], hashes: Sequence[bytes]) -> int:
        """Makes the content of held, full blocks known; returns how many became findable.

        A hash that another block already has stays with that block: a second copy could never
        be found. Raises `KeyStateError`, with nothing changed, when the lengths differ, a
        block is not held, or a block is already known under another hash.
        """
        if len(block_ids) != len(hashes):
            raise KeyStateError(f"{len(block_ids)} blocks, but {len(hashes)} hashes")
        given: dict[int, bytes] = {}
        for block, block_hash in zip(block_ids, hashes, strict=True):
            self._check_held(block, 1)
            known = given.setdefault(block, self._hash_of[block] or block_hash)
            if known != block_hash:
                raise KeyStateError(
                    f"block {block} is already known as {known.hex()[:16]}..., "
                    f"not {block_hash.hex()[:16]}..."
                )
        count = 0
        for block, block_hash in zip(block_ids, hashes, strict=True):
            if block_hash not in self._block_of:
                self._block_of[block_hash] = block
                self._hash_of[block] = block_hash
                count += 1
        self._published += count
        return count

    def free(self, block_ids: Sequence[int]) -> None:
        """Gives one reference of every block back; blocks are in the order of the request.

        The last block is queued for reuse first, so that the tail of a request is evicted
        before its head. Raises `KeyStateError`, with nothing changed, when a block has fewer
        references than are given back.
        """
        wanted: dict[int, int] = {}
        for block in block_ids:
            wanted[block] = wanted.get(block, 0) + 1
        for block, count in wanted.items():
            self._check_held(block, count)
        for block in reversed(block_ids):
            self._refs[block] -= 1
            if self._refs[block] == 0:
                if self._hash_of[block] is None:
                    self._blank.append(block)
                else:
                    self._cached[block] = None

    def _check_held(self, block: int, count: int) -> None:
        if not 0 <= block < self.num_blocks:
            raise KeyStateError(f"block {block} does not exist: the pool has {self.num_blocks}")
        if self._refs[block] < count:
            raise KeyStateError(f"block {block} has {self._refs[block]} references, not {count}")

    def validate(self) -> None:
        """Walks every invariant; raises `InvariantError` on the first broken one."""
        blank = set(self._blank)
        if len(blank) != len(self._blank):
            raise InvariantError("a block is twice in the blank list")
        for block, refs in enumerate(self._refs):
            known = self._hash_of[block]
            states = (refs > 0) + (block in blank) + (block in self._cached)
            if refs < 0 or states != 1:
                raise InvariantError(f"block {block} with {refs} references is in {states} states")
            if block in self._cached and known is None:
                raise InvariantError(f"block {block} is cached without a hash")
            if block in blank and known is not None:
                raise InvariantError(f"blank block {block} still has a hash")
            if known is not None and self._block_of.get(known) != block:
                raise InvariantError(f"the hash of block {block} leads to another block")
        known_blocks = sum(known is not None for known in self._hash_of)
        if known_blocks != len(self._block_of):
            raise InvariantError(f"{known_blocks} known blocks, {len(self._block_of)} hashes")
