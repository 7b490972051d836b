import gc

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier import Region
from kvtier.errors import ClosedError, TransferError
from kvtier.torch import (
    FullAttentionSpec,
    KVCache,
    TransferEngine,
    allocate_kv_cache,
    region_tensor,
)

SLOTS = 5


def make_cache(layers: int, blocks: int, seed: int = 0) -> KVCache:
    """A cache of random bytes whose layers have pages of different sizes."""
    specs = {
        f"l{index}": FullAttentionSpec(
            2, 1 + index % 2, 3 + index, (torch.float32, torch.bfloat16)[index % 2]
        )
        for index in range(layers)
    }
    cache = allocate_kv_cache(specs, blocks, "cpu")
    fill(cache, seed)
    return cache


def fill(cache: KVCache, seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    for tensor in cache.canonical:
        tensor.copy_(torch.randint(-128, 128, tensor.shape, generator=draw, dtype=torch.int8))


def naive_chunk(cache: KVCache, block_ids: list[int]) -> bytes:
    """A chunk as the contract words it: `[tensor][block in chunk][page_bytes]`."""
    return b"".join(
        bytes(tensor[block].numpy()) for tensor in cache.canonical for block in block_ids
    )


def test_the_region_is_a_tensor_without_a_copy() -> None:
    region = Region(3, 5000)
    rows = region_tensor(region)
    assert rows.shape == (3, 8192)
    assert rows.dtype == torch.uint8
    rows[2, 17] = 99
    assert memoryview(region)[2, 17] == 99
    assert rows.data_ptr() == region.data_ptr
    del region
    gc.collect()
    assert int(rows[2, 17]) == 99  # the tensor keeps the mapping alive


@settings(deadline=None, max_examples=60)
@given(st.data(), st.integers(1, 4), st.integers(1, 3), st.integers(0, SLOTS))
def test_store_and_load_against_a_naive_copy(
    data: st.DataObject, layers: int, per_chunk: int, chunks: int
) -> None:
    blocks = SLOTS * per_chunk + 2
    cache = make_cache(layers, blocks)
    order = data.draw(st.permutations(range(blocks)))
    ids = np.array(order[: chunks * per_chunk], np.int64).reshape(chunks, per_chunk)
    slots = data.draw(st.permutations(range(SLOTS)))[:chunks]
    region = Region(SLOTS, cache.page_bytes * per_chunk)
    rows = region_tensor(region)
    with TransferEngine(region, cache, per_chunk) as engine:
        expected = [naive_chunk(cache, line) for line in ids.tolist()]
        job = engine.store(ids, slots)
        engine.wait(job)
        assert job.done()
        assert job.bytes == chunks * engine.chunk_bytes == sum(map(len, expected))
        assert job.seconds >= 0
        for slot, chunk in zip(slots, expected, strict=True):
            assert bytes(rows[slot].numpy())[: len(chunk)] == chunk
        untouched = [slot for slot in range(SLOTS) if slot not in slots]
        assert not rows[untouched].any()

        # Into other blocks of a cache that has other bytes by now.
        fill(cache, seed=1)
        target = np.array(data.draw(st.permutations(range(blocks)))[: ids.size], np.int64)
        target = target.reshape(chunks, per_chunk)
        others = [block for block in range(blocks) if block not in target]
        before = naive_chunk(cache, others)
        engine.wait(engine.load(target, np.array(slots, np.uint32)))
        assert [naive_chunk(cache, line) for line in target.tolist()] == expected
        assert naive_chunk(cache, others) == before


def test_jobs_run_in_the_order_they_were_submitted() -> None:
    cache = make_cache(2, 4)
    region = Region(2, cache.page_bytes * 2)
    first = naive_chunk(cache, [0, 1])
    with TransferEngine(region, cache, 2) as engine:
        engine.store([[0, 1]], [0])
        engine.load([[2, 3]], [0])
        engine.store([[2, 3]], [1])
    assert bytes(region_tensor(region)[1].numpy())[: len(first)] == first


@pytest.mark.parametrize("verb", ["store", "load"])
@pytest.mark.parametrize(
    ("ids", "slots", "complaint"),
    [
        ([[0, 6]], [0], "block 6 does not exist: there are 6"),
        ([[0, -1]], [0], "block -1 does not exist"),
        ([[0, 1]], [SLOTS], f"slot {SLOTS} does not exist: there are {SLOTS}"),
        ([[0, 1]], [-1], "slot -1 does not exist"),
        ([[0, 1, 2]], [0], r"shape \(chunks, 2\), not \(1, 3\)"),
        ([0, 1], [0], r"shape \(chunks, 2\), not \(2,\)"),
        ([[0, 1]], [0, 1], r"slots of the shape \(1,\), not \(2,\)"),
        ([[0, 1]], [[0]], r"slots of the shape \(1,\), not \(1, 1\)"),
        ([[0.0, 1.0]], [0], "block_ids must be integers, not float64"),
        (torch.zeros(1, 2, dtype=torch.int64, device="meta"), [0], "lies on meta"),
    ],
)
def test_bad_ids_are_refused_before_any_byte_moves(
    verb: str, ids: object, slots: object, complaint: str
) -> None:
    cache = make_cache(2, 6)
    region = Region(SLOTS, cache.page_bytes * 2)
    region_tensor(region).fill_(7)
    before = naive_chunk(cache, list(range(6)))
    with (
        TransferEngine(region, cache, 2) as engine,
        pytest.raises(TransferError, match=complaint),
    ):
        getattr(engine, verb)(ids, slots)
    assert naive_chunk(cache, list(range(6))) == before
    assert bool((region_tensor(region) == 7).all())


def test_a_destination_that_is_given_twice_is_refused() -> None:
    cache = make_cache(1, 4)
    region = Region(SLOTS, cache.page_bytes * 2)
    with TransferEngine(region, cache, 2) as engine:
        with pytest.raises(TransferError, match="destination block 1 is given twice"):
            engine.load([[0, 1], [1, 2]], [0, 1])
        with pytest.raises(TransferError, match="slot 3 is given twice"):
            engine.store([[0, 1], [2, 3]], [3, 3])
        # Reading a block or a slot twice is harmless.
        engine.wait(engine.store([[0, 1], [1, 0]], [0, 1]))
        engine.wait(engine.load([[0, 1], [2, 3]], [0, 0]))
    assert naive_chunk(cache, [0, 1]) == naive_chunk(cache, [2, 3])


def test_engines_that_can_not_work_are_refused() -> None:
    cache = make_cache(1, 4)
    region = Region(1, 1)
    with pytest.raises(TransferError, match=r"a slot of the region has only 4096.*slot_bytes="):
        TransferEngine(region, cache, 4096)
    with pytest.raises(TransferError, match="blocks_per_chunk is 0"):
        TransferEngine(region, cache, 0)
    meta = allocate_kv_cache({"a": FullAttentionSpec(1, 1, 1, torch.int8)}, 1, "meta")
    with pytest.raises(TransferError, match="meta are not supported"):
        TransferEngine(region, meta, 1)
    engine = TransferEngine(region, cache, 1)
    engine.close()
    engine.close()
    with pytest.raises(ClosedError):
        engine.store([[0]], [0])
