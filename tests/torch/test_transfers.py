"""Transfers on CPU tensors against a naive copy by way of the kernels' views."""

import gc
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.torch.drawn_specs import Drawn, caches, fill, pages_of

from kvtier import Moves, Region
from kvtier.errors import ClosedError, LayoutError, TransferError
from kvtier.torch import (
    FullAttentionSpec,
    GroupBlocks,
    KVCache,
    SlidingWindowSpec,
    TransferEngine,
    allocate_kv_cache,
    region_tensor,
)
from kvtier.torch.host_lanes import HostLanes
from kvtier.torch.ordering import Lane, Ordering

SLOTS = 5


def make_cache(blocks: int = 6) -> KVCache:
    specs = {
        "a": FullAttentionSpec(2, 1, 3, torch.float32),
        "b": FullAttentionSpec(2, 2, 4, torch.bfloat16),
    }
    cache = allocate_kv_cache(specs, blocks, "cpu")
    fill(cache, 0)
    return cache


def chunk_pages(cache: KVCache, group: int, block: int) -> bytes:
    """A block of a group as the contract words it: the pages of its layers, in order."""
    first = sum(len(cache.groups[index].specs) for index in range(group))
    pages = pages_of(cache, block)[first : first + len(cache.groups[group].specs)]
    return b"".join(pages)


def without_gaps(cache: KVCache, group: int, block: bytes) -> bytes:
    """The bytes of parts; what lies between them for alignment is nobody's."""
    kept, base = b"", 0
    for spec in cache.groups[group].specs.values():
        kept += b"".join(block[base + start : base + end] for start, end in spec.part_ranges())
        base += spec.page_bytes
    return kept


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


@settings(max_examples=150)
@given(caches(), st.data(), st.integers(1, 3))
def test_store_and_load_against_a_naive_copy(
    drawn: Drawn, data: st.DataObject, per_chunk: int
) -> None:
    """Every layout, type, sharing and shape of groups; first and last chunks in part."""
    blocks = 8
    cache = drawn.allocate(blocks)
    fill(cache, 1)
    group = data.draw(st.integers(0, len(cache.groups) - 1))
    ids = data.draw(st.lists(st.integers(0, blocks - 1), max_size=blocks, unique=True))
    first = data.draw(st.integers(0, per_chunk - 1))
    chunks = -(-(first + len(ids)) // per_chunk) if ids else 0
    region = Region(blocks + 1, cache.page_bytes * per_chunk)
    rows = region_tensor(region)
    slots = data.draw(st.permutations(range(blocks + 1)))[:chunks]
    block_bytes = cache.groups[group].page_bytes
    places = [divmod(first + index, per_chunk) for index in range(len(ids))]
    with TransferEngine(region, cache, per_chunk) as engine:
        expected = [without_gaps(cache, group, chunk_pages(cache, group, block)) for block in ids]
        job = engine.store(ids, slots, group=group, first=first)
        engine.wait(job)
        assert job.done()
        assert job.error is None
        assert job.bytes == sum(map(len, expected))
        written = torch.zeros_like(rows, dtype=torch.bool)
        for (chunk, place), pages in zip(places, expected, strict=True):
            at = slice(place * block_bytes, (place + 1) * block_bytes)
            in_slot = bytes(rows[slots[chunk], at].tolist())
            assert without_gaps(cache, group, in_slot) == pages
            written[slots[chunk], at] = True
        assert not rows[~written].any()

        # Into other blocks of a cache that has other bytes by now.
        fill(cache, 2)
        target = data.draw(st.permutations(range(blocks)))[: len(ids)]
        before = [pages_of(cache, block) for block in range(blocks)]
        engine.wait(engine.load(target, slots, group=group, first=first))
    for block in range(blocks):
        if block in target:
            loaded = without_gaps(cache, group, chunk_pages(cache, group, block))
            assert loaded == expected[target.index(block)]
        else:
            assert pages_of(cache, block) == before[block]


def test_several_groups_are_one_job() -> None:
    full = FullAttentionSpec(2, 2, 4, torch.bfloat16)
    window = SlidingWindowSpec(2, 1, 4, torch.bfloat16, window=3)
    cache = allocate_kv_cache({"a": full, "w": window}, 8, "cpu")
    fill(cache, 3)
    region = Region(4, 2 * cache.page_bytes)
    expected = [chunk_pages(cache, 0, 1), chunk_pages(cache, 1, 2), chunk_pages(cache, 1, 0)]
    with TransferEngine(region, cache, 2) as engine:
        parts = [GroupBlocks([1], [3], group=0, first=1), GroupBlocks([2, 0], [1], group=1)]
        job = engine.store_groups(parts)
        assert job.bytes == sum(map(len, expected))
        engine.wait(job)
        fill(cache, 4)
        moved = [GroupBlocks([5], [3], group=0, first=1), GroupBlocks([6, 7], [1], group=1)]
        engine.wait(engine.load_groups(moved, expedited=True))
        assert chunk_pages(cache, 0, 5) == expected[0]
        assert [chunk_pages(cache, 1, block) for block in (6, 7)] == expected[1:]
        # Groups lie over each other: a block belongs to one of them.
        twice = [GroupBlocks([5], [0], group=0), GroupBlocks([5], [1], group=1)]
        with pytest.raises(TransferError, match="block 5 is a destination of two groups"):
            engine.load_groups(twice)
        with pytest.raises(TransferError, match="slot 0 is a destination of two groups"):
            engine.store_groups([GroupBlocks([5], [0]), GroupBlocks([4], [0], group=1)])


@contextmanager
def held_up(engine: TransferEngine, lane: Lane) -> Iterator[None]:
    """A lane whose worker is busy until the block ends."""
    lanes = engine.lanes
    assert isinstance(lanes, HostLanes)
    gate = threading.Event()
    lanes._workers[lane].submit(gate.wait)
    try:
        yield
    finally:
        gate.set()


def test_jobs_on_the_same_blocks_or_slots_keep_their_order() -> None:
    cache = make_cache()
    region = Region(2, cache.page_bytes * 2)
    first = [chunk_pages(cache, 0, block) for block in (0, 1)]
    with TransferEngine(region, cache, 2) as engine:
        with held_up(engine, Lane.STORE):
            engine.store([[0, 1]], [0])
            engine.load([[2, 3]], [0])
            engine.load([[4, 5]], [0], expedited=True)
            last = engine.store([[2, 3]], [1])
            assert not last.done()
        engine.wait(last)
    in_slot = bytes(region_tensor(region)[1].tolist())
    assert in_slot[: 2 * cache.page_bytes] == b"".join(first)
    assert [chunk_pages(cache, 0, block) for block in (4, 5)] == first


def test_expedited_loads_do_not_queue_behind_other_loads() -> None:
    cache = make_cache()
    region = Region(2, cache.page_bytes)
    with TransferEngine(region, cache, 1) as engine, held_up(engine, Lane.LOAD):
        queued = engine.load([0], [0])
        engine.wait(engine.load([1], [0], expedited=True))  # reads the same slot
        assert not queued.done()
        behind = engine.load([0], [1], expedited=True)  # writes the same block
        assert not behind.done()


def test_finished_names_each_job_once() -> None:
    cache = make_cache()
    region = Region(2, cache.page_bytes)
    with TransferEngine(region, cache, 1) as engine:
        waited = engine.store([0], [0])
        engine.wait(waited)
        with held_up(engine, Lane.STORE):
            other = engine.store([1], [1])
            assert engine.finished() == []
        other.wait()
        assert engine.finished() == [other]
        assert engine.finished() == []


@pytest.mark.parametrize("verb", ["store", "load"])
@pytest.mark.parametrize(
    ("ids", "slots", "where", "complaint"),
    [
        ([[0, 6]], [0], {}, "block 6.*does not exist: there are 6"),
        ([[0, -1]], [0], {}, "block -1.*does not exist"),
        ([[0, 1]], [SLOTS], {}, f"slot {SLOTS}.*does not exist: there are {SLOTS}"),
        ([[0, 1]], [-1], {}, "slot -1.*does not exist"),
        ([[0, 1, 2]], [0], {}, r"shape \(blocks,\) or \(chunks, 2\), not \(1, 3\)"),
        ([[[0, 1]]], [0], {}, r"one or two dimensions.*\(1, 1, 2\)"),
        ([0, 1, 2], [0], {}, "3 blocks from place 0.*take 2 slots of 2 blocks, but 1"),
        ([0, 1], [0], {"first": 1}, "2 blocks from place 1.*take 2 slots"),
        ([0], [0], {"first": 2}, "at place 2 of its chunk, but a chunk has 2"),
        ([0], [0], {"first": -1}, "at place -1 of its chunk"),
        ([0], [0], {"group": 1}, "group 1 does not exist: there are 1"),
        ([[0, 1]], [0, 1], {}, "take 1 slots.*but 2 were given"),
        ([[0, 1]], [[0]], {}, r"slots one, not the shapes \(1, 2\) and \(1, 1\)"),
        ([[0.0, 1.0]], [0], {}, "block_ids must be integers, not float64"),
        (torch.zeros(1, 2, dtype=torch.int64, device="meta"), [0], {}, "lies on meta"),
    ],
)
def test_bad_ids_are_refused_before_any_byte_moves(
    verb: str, ids: object, slots: object, where: dict[str, int], complaint: str
) -> None:
    cache = make_cache()
    region = Region(SLOTS, cache.page_bytes * 2)
    region_tensor(region).fill_(7)
    before = [pages_of(cache, block) for block in range(6)]
    with (
        TransferEngine(region, cache, 2) as engine,
        pytest.raises(TransferError, match=complaint),
    ):
        getattr(engine, verb)(ids, slots, **where)
    assert [pages_of(cache, block) for block in range(6)] == before
    assert bool((region_tensor(region) == 7).all())


def test_a_destination_that_is_given_twice_is_refused() -> None:
    cache = make_cache(4)
    region = Region(SLOTS, cache.page_bytes * 2)
    with TransferEngine(region, cache, 2) as engine:
        with pytest.raises(TransferError, match="block 1 is given twice"):
            engine.load([[0, 1], [1, 2]], [0, 1])
        with pytest.raises(TransferError, match="slot 3 is given twice"):
            engine.store([[0, 1], [2, 3]], [3, 3])
        # Reading a block or a slot twice is harmless.
        engine.wait(engine.store([[0, 1], [1, 0]], [0, 1]))
        engine.wait(engine.load([[0, 1], [2, 3]], [0, 0]))
    assert [pages_of(cache, 0), pages_of(cache, 1)] == [pages_of(cache, 2), pages_of(cache, 3)]


def test_a_cache_is_registered_once_and_before_the_first_transfer() -> None:
    cache = make_cache(4)
    region = Region(1, cache.page_bytes)
    with TransferEngine(region, None, 1) as engine:
        for verb in (engine.store, engine.load):
            with pytest.raises(TransferError, match="no KV cache is registered yet"):
                verb([0], [0])
        engine.register(cache.canonical)
        assert engine.chunk_bytes == cache.page_bytes
        engine.wait(engine.store([0], [0]))
        with pytest.raises(TransferError, match="registered already"):
            engine.register(cache)
    with pytest.raises(ClosedError):
        engine.register(cache)


def test_engines_that_can_not_work_are_refused() -> None:
    cache = make_cache(4)
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


@given(st.data())
def test_ordering_against_every_pair_of_jobs(data: st.DataObject) -> None:
    """Followed lanes and what those jobs followed cover every earlier job that conflicts."""
    ordering = Ordering(3, 2)
    jobs: list[tuple[Lane, set[int], set[int]]] = []
    reached: list[set[int]] = []
    for number in range(1, data.draw(st.integers(1, 12)) + 1):
        lane = data.draw(st.sampled_from(list(Lane)))
        block, slot = data.draw(st.integers(0, 2)), data.draw(st.integers(0, 1))
        moves = Moves(
            np.array([block]),
            np.array([slot]),
            to_slots=lane is Lane.STORE,
            num_blocks=3,
            num_slots=2,
            blocks_per_chunk=1,
        )
        waits = ordering.add(number, lane, [moves])
        # A lane is a queue: a job follows all of its lane, and all that those followed.
        queue = [index for index, job in enumerate(jobs, 1) if job[0] is lane]
        direct = {*waits, *queue}
        closure = set(direct)
        for other in direct:
            closure |= reached[other - 1]
            same = jobs[other - 1][0]
            closure |= {index for index, job in enumerate(jobs[:other], 1) if job[0] is same}
        for index, (before, blocks, slots) in enumerate(jobs, 1):
            loads = Lane.STORE not in (lane, before)
            both_store = lane is before is Lane.STORE
            conflict = (block in blocks and not both_store) or (slot in slots and not loads)
            assert not conflict or index in closure
        assert all(jobs[other - 1][0] is not lane for other in waits)
        jobs.append((lane, {block}, {slot}))
        reached.append(closure)


def test_ranks_that_can_not_hold_the_shards_are_refused() -> None:
    from kvtier.torch import TensorParallel

    spec = FullAttentionSpec(2, 2, 4, torch.bfloat16, total_kv_heads=4)
    cache = allocate_kv_cache({"a": spec}, 2, "cpu")
    region = Region(1, 4096)
    with pytest.raises(LayoutError, match="in 2 shards, which 3 tensor-parallel ranks"):
        TransferEngine(region, cache, 1, tensor_parallel=TensorParallel(3, 0))
    with pytest.raises(LayoutError, match="rank 3 of 3"):
        TensorParallel(3, 3)


def test_an_engine_refuses_to_work_after_fork() -> None:
    """In a process of its own: forking one with threads of torch in it is asking for trouble."""
    code = """
import os, sys
from kvtier import Region
from kvtier.errors import ForkError
from kvtier.torch import FullAttentionSpec, TransferEngine, allocate_kv_cache
import torch
cache = allocate_kv_cache({"a": FullAttentionSpec(1, 1, 1, torch.int8)}, 2, "cpu")
engine = TransferEngine(Region(1, 64), cache, 1)
child = os.fork()
if child == 0:
    try:
        engine.store([0], [0])
    except ForkError as error:
        os._exit(0 if "spawn" in str(error) else 1)
    os._exit(2)
_, status = os.waitpid(child, 0)
engine.wait(engine.store([0], [0]))
engine.close()
sys.exit(os.waitstatus_to_exitcode(status))
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
