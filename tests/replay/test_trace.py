"""`Trace`: counts against plain models of a cache, and every error."""

from __future__ import annotations

import os
import signal
import tempfile
import threading
from collections import OrderedDict
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier._kvtier import POLICIES, Trace
from kvtier.errors import ConfigError
from kvtier.replay import MAX_CAPACITY

from .conftest import Write

Requests = list[list[int]]


def lru(requests: Requests, capacity: int) -> tuple[int, int]:
    """Block hits and prefix hits of a plain LRU, told of a request's head last."""
    cache: OrderedDict[int, None] = OrderedDict()
    block_hits = prefix_hits = 0
    for request in requests:
        blocks = list(dict.fromkeys(request))
        whole = True
        for block in blocks:
            hit = block in cache
            whole = whole and hit
            block_hits += hit
            prefix_hits += whole
        kept = blocks[:capacity]
        present = [block for block in kept if block in cache]
        for block in present:
            cache.move_to_end(block)
        for _ in range(len(cache) + len(kept) - len(present) - capacity):
            cache.popitem(last=False)
        for block in reversed(kept):
            cache[block] = None
            cache.move_to_end(block)
    return block_hits, prefix_hits


def best(accesses: list[int], capacity: int) -> int:
    """Most hits that any choice of what to keep has: all choices are tried."""
    reachable = {frozenset[int](): 0}
    for block in accesses:
        after: dict[frozenset[int], int] = {}
        for kept, hits in reachable.items():
            now = hits + (block in kept)
            choices = [kept]
            if block not in kept:
                choices += [kept - {out} | {block} for out in kept]
                if len(kept) < capacity:
                    choices.append(kept | {block})
            for choice in choices:
                after[choice] = max(after.get(choice, 0), now)
        reachable = after
    return max(reachable.values())


def trace_of(requests: Requests) -> Trace:
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "trace.jsonl"
        path.write_text("".join(f'{{"hash_ids": {blocks}}}\n' for blocks in requests))
        return Trace.read(path)


some_requests = st.lists(st.lists(st.integers(0, 30), max_size=10), min_size=1, max_size=60)


@given(some_requests, st.integers(1, 40))
def test_lru_is_what_a_plain_simulator_finds(requests: Requests, capacity: int) -> None:
    counts = trace_of(requests).replay("lru", capacity)
    assert (counts["block_hits"], counts["prefix_hits"]) == lru(requests, capacity)


@given(some_requests, st.integers(1, 40), st.sampled_from(POLICIES))
def test_no_policy_beats_the_optimum(requests: Requests, capacity: int, policy: str) -> None:
    trace = trace_of(requests)
    counts = trace.replay(policy, capacity)
    assert counts["prefix_hits"] <= counts["block_hits"] <= trace.optimum(capacity)
    kept = [list(dict.fromkeys(blocks)) for blocks in requests if blocks]
    assert (counts["requests"], counts["blocks"]) == (len(kept), sum(map(len, kept)))
    again = trace.replay(policy, capacity)
    assert {**again, "seconds": 0} == {**counts, "seconds": 0}


@given(st.lists(st.integers(0, 5), min_size=1, max_size=12), st.integers(0, 3))
def test_the_optimum_is_the_best_of_all_choices(accesses: list[int], capacity: int) -> None:
    assert trace_of([[block] for block in accesses]).optimum(capacity) == best(accesses, capacity)


@given(some_requests, st.sampled_from(POLICIES))
def test_a_memory_for_every_block_evicts_nothing(requests: Requests, policy: str) -> None:
    trace = trace_of([*requests, [1]])
    counts = trace.replay(policy, trace.distinct)
    assert counts["evictions"] == 0
    assert counts["block_hits"] == trace.blocks - trace.distinct == trace.optimum(trace.distinct)


def test_what_a_trace_says_of_itself(write: Write) -> None:
    trace = Trace.read(write([[1, 2, 2, 3], [], [1, 2]]))
    assert (trace.requests, trace.blocks, trace.distinct) == (2, 5, 3)
    assert repr(trace) == "Trace(requests=2, blocks=5)"
    assert trace.replay("lru", 10)["seconds"] >= 0


@pytest.mark.parametrize(
    "line",
    [
        b"nonsense",
        b"[1]",
        b'{"hash_ids": [-1]}',
        b'{"timestamp": 1}',
        b'{"hash_ids": ["a"]}',
        b"\xff",
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: bytes) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_bytes(b'{"hash_ids": [1]}\n\n' + line + b"\n")
    with pytest.raises(ConfigError, match=r"bad\.jsonl: line 3 is no request") as caught:
        Trace.read(path)
    assert "\n" not in str(caught.value)


def test_files_that_can_not_be_read(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError) as caught:
        Trace.read(tmp_path / "none.jsonl")
    assert caught.value.filename == str(tmp_path / "none.jsonl")
    with pytest.raises(IsADirectoryError):
        Trace.read(str(tmp_path))


def test_what_can_not_be_replayed(write: Write) -> None:
    trace = Trace.read(write([[1]]))
    with pytest.raises(ConfigError, match='unknown policy "fifo": use one of lru'):
        trace.replay("fifo", 1)
    for capacity in (0, MAX_CAPACITY + 1, 2**40):
        with pytest.raises(ConfigError, match=f"a capacity of {capacity} "):
            trace.replay("lru", capacity)
    assert trace.replay("lru", MAX_CAPACITY)["blocks"] == 1


def stopped(_number: int, _frame: object) -> None:
    raise KeyboardInterrupt


def test_ctrl_c_ends_what_is_long(tmp_path: Path) -> None:
    """A pipe that never ends: only the interrupt can end reading from it."""
    pipe = tmp_path / "endless.jsonl"
    os.mkfifo(pipe)
    reading, over = threading.Event(), threading.Event()

    def feed() -> None:
        lines = b'{"hash_ids": [1, 2, 3]}\n' * 2000
        with pipe.open("wb", buffering=0) as file:
            try:
                for number in range(1_000_000):
                    file.write(lines)
                    if number == 20:
                        reading.set()
            except BrokenPipeError:
                over.set()

    def interrupt() -> None:
        reading.wait()
        signal.raise_signal(signal.SIGINT)

    before = signal.signal(signal.SIGINT, stopped)
    threads = [threading.Thread(target=work) for work in (feed, interrupt)]
    try:
        for thread in threads:
            thread.start()
        with pytest.raises(KeyboardInterrupt):
            Trace.read(pipe)
    finally:
        signal.signal(signal.SIGINT, before)
        for thread in threads:
            thread.join()
    assert over.is_set()
