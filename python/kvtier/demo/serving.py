"""The engine's part: one turn at a time, with every tier between it and a full prefill.

A turn takes the longest prefix of its prompt that the GPU pool holds, asks the manager for the
chunks behind it, computes the rest, answers, and stores what it computed. Only chunks that full
prefill tiles computed are published, see `kvtier.demo.decoder`.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvtier._kvtier import HIT, HIT_PENDING, RETRY, Manager, PreparedStore
from kvtier.demo.decoder import Decoder
from kvtier.demo.records import CopyTotals
from kvtier.errors import KeyStateError
from kvtier.keys import hash_blocks, make_offload_key
from kvtier.torch import BlockPool, BlockTables, KVCache, TableGroup, TransferEngine

__all__ = ["ChatServer", "ServedTurn"]

_ROW = 0  # turns come one after the other, so one row of the block tables is enough
_GROUP = 0  # every layer is full attention: one group
_PROMOTION_SECONDS = 20.0
_STORE_ATTEMPTS = 100
_STORE_PAUSE_SECONDS = 0.1


@dataclass(frozen=True)
class ServedTurn:
    """What a turn gave. Its blocks stay held until `ChatServer.finish`."""

    tokens: list[int]
    block_ids: list[int]
    reused: dict[str, int]
    """Tokens by source: "gpu", "primary", tier names."""
    ttft_s: float
    hashes: list[bytes]
    """Hashes of the prompt's blocks that may be published."""
    chunks_not_stored: int


class ChatServer:
    """Serves turns out of one GPU pool, one primary region and the tiers behind it."""

    def __init__(
        self,
        decoder: Decoder,
        kv_cache: KVCache,
        transfers: TransferEngine,
        manager: Manager,
    ) -> None:
        """The caller closes `transfers` and shuts `manager` down."""
        self._decoder = decoder
        self.kv_cache = kv_cache
        self._transfers = transfers
        self._manager = manager
        self._chunk_blocks = transfers.blocks_per_chunk
        block_size = kv_cache.groups[_GROUP].block_size
        self._chunk_tokens = self._chunk_blocks * block_size
        table = TableGroup(block_size, kv_cache.num_blocks)
        self._tables = BlockTables([table], 1, self._chunk_tokens, kv_cache.device)
        # A prefix may be longer than the primary tier. Half of it at a time leaves room for
        # slots that a cascade still pins.
        self._window = max(1, manager.region.slots // 2)
        self.pool = BlockPool(kv_cache.num_blocks)
        self.stored = CopyTotals()
        self.loaded = CopyTotals()

    def serve(self, request: int, prompt: Sequence[int], new_tokens: int) -> ServedTurn:
        """Answers `prompt` with `new_tokens` tokens, greedily.

        Raises `PoolExhaustedError` when the GPU pool has no room for the turn.
        """
        began = time.perf_counter()
        block_size = self.kv_cache.groups[_GROUP].block_size
        chunks = len(prompt) // self._chunk_tokens
        hashes = hash_blocks(prompt, block_size)[: chunks * self._chunk_blocks]
        keys = [
            make_offload_key(block_hash, _GROUP)
            for block_hash in hashes[self._chunk_blocks - 1 :: self._chunk_blocks]
        ]
        # The last token is always computed: its logits are the answer's first token.
        usable = (len(prompt) - 1) // self._chunk_tokens

        held = self._match_gpu(hashes[: usable * self._chunk_blocks])
        on_gpu = len(held) // self._chunk_blocks
        total_blocks = -(-(len(prompt) + new_tokens) // block_size)
        held += self.pool.allocate(total_blocks - len(held))
        self._tables.clear(_ROW)
        self._tables.append(_ROW, [held])
        # The host's copy of what the GPU has must not look unused, or it goes first.
        self._manager.touch(request, keys[:on_gpu])

        reused = {"gpu": on_gpu, "primary": 0, **dict.fromkeys(self._tier_names(), 0)}
        first = on_gpu
        while first < usable:
            window = keys[first : min(usable, first + self._window)]
            loaded = self._restore(request, window, held[first * self._chunk_blocks :], reused)
            first += loaded
            if loaded < len(window):
                break

        logits = self._decoder.prefill(
            prompt,
            first * self._chunk_tokens,
            self._chunk_tokens,
            self.kv_cache,
            self._tables,
            _ROW,
        )
        tokens = [int(logits.argmax())]
        ttft = time.perf_counter() - began
        skipped = self._store(request, keys[first:], held[first * self._chunk_blocks :])
        for position in range(len(prompt), len(prompt) + new_tokens - 1):
            logits = self._decoder.decode(tokens[-1], position, self.kv_cache, self._tables, _ROW)
            tokens.append(int(logits.argmax()))
        return ServedTurn(
            tokens=tokens,
            block_ids=held,
            reused={name: count * self._chunk_tokens for name, count in reused.items()},
            ttft_s=ttft,
            hashes=hashes,
            chunks_not_stored=skipped,
        )

    def finish(self, request: int, turn: ServedTurn) -> None:
        """Publishes the turn's full chunks in the GPU pool and gives its blocks back."""
        self.pool.publish(turn.block_ids[: len(turn.hashes)], turn.hashes)
        self.pool.free(turn.block_ids)
        self._manager.request_finished(request)
        self._manager.end_step()

    def _match_gpu(self, hashes: list[bytes]) -> list[int]:
        """Holds the blocks of the longest cached prefix of whole chunks."""
        matched = self.pool.match_prefix(hashes)
        whole = len(matched) // self._chunk_blocks * self._chunk_blocks
        self.pool.free(matched[whole:])
        return matched[:whole]

    def _restore(
        self, request: int, keys: list[bytes], blocks: list[int], reused: dict[str, int]
    ) -> int:
        """Loads the longest prefix of `keys` that the tiers have; returns its chunks."""
        before = self._tier_hits()
        states = self._manager.lookup_prefix(request, keys)
        found = states == HIT
        deadline = time.monotonic() + _PROMOTION_SECONDS
        while True:
            states = self._await_promotions(request, keys, states, deadline)
            ready = _leading_hits(states)
            if ready == 0:
                return 0
            try:
                slots = self._manager.prepare_load(request, keys[:ready])
            except KeyStateError:
                # A promotion of this very lookup took the slot of an earlier hit: ask again.
                if time.monotonic() >= deadline:
                    return 0
                states = self._manager.lookup_prefix(request, keys)
                continue
            break
        try:
            job = self._transfers.load(self._by_chunk(blocks, ready), slots)
            self._transfers.wait(job)
        finally:
            self._manager.complete_load(request, keys[:ready])
        self.loaded.add(job.bytes, job.seconds)
        at_once = int(found[:ready].sum())
        reused["primary"] += at_once
        self._credit_tiers(reused, before, ready - at_once)
        return ready

    def _await_promotions(
        self, request: int, keys: list[bytes], states: NDArray[np.uint8], deadline: float
    ) -> NDArray[np.uint8]:
        """Ends steps until no key is on its way; one that failed or is late is a miss."""
        self._manager.end_step()  # submits what the lookup queued
        while np.isin(states, (HIT_PENDING, RETRY)).any():
            left = deadline - time.monotonic()
            if left <= 0:
                break
            if not self._manager.wait(left):
                time.sleep(0.001)  # RETRY with nothing in flight: wait() does not wait then
            self._manager.end_step()
            states = self._manager.lookup_prefix(request, keys)
            self._manager.end_step()
        return states

    def _credit_tiers(self, reused: dict[str, int], before: dict[str, int], promoted: int) -> None:
        """Counts promoted chunks for the tiers whose hits went up, fastest tier first."""
        after = self._tier_hits()
        for number, name in enumerate(after, 1):
            last = number == len(after)
            part = promoted if last else min(promoted, after[name] - before[name])
            reused[name] += part
            promoted -= part

    def _store(self, request: int, keys: list[bytes], blocks: list[int]) -> int:
        """Copies new chunks to the primary tier; returns how many found no room in time."""
        skipped = 0
        for first in range(0, len(keys), self._window):
            window = keys[first : first + self._window]
            chunks = self._by_chunk(blocks[first * self._chunk_blocks :], len(window))
            prepared = self._prepare_store(request, window)
            if prepared is None:
                skipped += len(window)
                continue
            written = [window[index] for index in prepared.indices]
            ok = False
            try:
                job = self._transfers.store(chunks[prepared.indices], prepared.slots)
                self._transfers.wait(job)
                ok = True
            finally:
                self._manager.complete_store(request, written, ok)
            self.stored.add(job.bytes, job.seconds)
            self._manager.end_step()
        return skipped

    def _prepare_store(self, request: int, keys: list[bytes]) -> PreparedStore | None:
        for _ in range(_STORE_ATTEMPTS):
            prepared = self._manager.prepare_store(request, keys)
            if prepared is not None:
                return prepared
            # Every slot is pinned by a cascade: its end gives room.
            self._manager.end_step()
            if not self._manager.wait(_STORE_PAUSE_SECONDS):
                time.sleep(0.001)
            self._manager.end_step()
        return None

    def _by_chunk(self, blocks: list[int], chunks: int) -> NDArray[np.int64]:
        """The first `chunks` chunks of `blocks` as `(chunks, blocks_per_chunk)`."""
        ids = np.asarray(blocks[: chunks * self._chunk_blocks], np.int64)
        return ids.reshape(chunks, self._chunk_blocks)

    def _tier_names(self) -> list[str]:
        return list(self._manager.stats()["tiers"])

    def _tier_hits(self) -> dict[str, int]:
        return {name: tier["hits"] for name, tier in self._manager.stats()["tiers"].items()}


def _leading_hits(states: NDArray[np.uint8]) -> int:
    """Number of HITs before the first other answer."""
    others = np.flatnonzero(states != HIT)
    return int(others[0]) if others.size else len(states)
