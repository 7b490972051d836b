"""`kill -9` at any point: what was stored is there, what is there is whole, nothing leaks.

A writer stores chunks as fast as it can and says what it stored; it is killed after a drawn
number of lines, wherever it is by then. `CRASHES` says how often in all, 20 by default; `make
crash` runs 240.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from tests.core import file_writer
from tests.core.file_writer import BATCH, CHUNK, NUMBERS, content, key

from kvtier import HIT, MISS, store

How = tuple[str, bool]  # which engine, and whether it goes past the page cache

ENGINES: tuple[How, ...] = (("auto", True), ("threads", False), ("threads", True), ("auto", False))
ROUNDS = 5  # crashes of one store
CRASHES = int(os.environ.get("CRASHES", "20"))
AMPLE = (NUMBERS + 2) * CHUNK
SMALL = 40 * CHUNK


def crash(
    path: Path, capacity: int, how: How, numbers: range, seed: int
) -> tuple[set[int], set[int]]:
    """Runs a writer and kills it. The chunks it said it stored, and those it may have evicted."""
    draw = random.Random(seed)
    lines = draw.randrange(1, len(numbers) // 2)
    arguments = [path, capacity, *how, numbers.start, numbers.stop, seed]
    process = subprocess.Popen(
        [sys.executable, file_writer.__file__, *map(str, arguments)],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "open\n"
    heard = [process.stdout.readline() for _ in range(lines)]
    # The moment itself is drawn too, or it would always be the one after a chunk was stored.
    moment = time.perf_counter() + draw.uniform(0, 0.005)
    while time.perf_counter() < moment:
        pass
    process.kill()
    heard += process.stdout.readlines()
    process.wait()
    process.stdout.close()
    stored: set[int] = set()
    gone: set[int] = set()
    for line in heard:
        word, _, number = line.partition(" ")
        # The last line may be cut where the process was.
        if line.endswith("\n"):
            (stored if word == "stored" else gone).add(int(number))
            (gone if word == "stored" else stored).discard(int(number))
    return stored, gone


def check(path: Path, capacity: int, how: How, expected: set[int]) -> set[int]:
    """Opens a store that was left by a crash; which chunks it serves, each of them whole."""
    assert sum(file.stat().st_size for file in path.iterdir()) <= capacity
    found = store.verify(path)
    assert found.corrupt == []
    manager = file_writer.open_manager(str(path), capacity, *how)
    served = set()
    rows = np.asarray(manager.region)
    for first in range(0, NUMBERS, BATCH):
        numbers = list(range(first, first + BATCH))
        batch = [key(number) for number in numbers]
        there = [
            number
            for number, answer in zip(numbers, manager.lookup(first, batch).tolist(), strict=True)
            if answer != MISS
        ]
        assert manager.drain(30)
        if there:
            keys = [key(number) for number in there]
            assert manager.lookup(first, keys).tolist() == [HIT] * len(there)
            for number, slot in zip(there, manager.prepare_load(first, keys), strict=True):
                assert (rows[slot] == content(number)).all(), f"wrong bytes for chunk {number}"
            manager.complete_load(first, keys)
            served.update(there)
        manager.request_finished(first)
    manager.validate()
    stats = manager.stats()
    assert sum(stats["tiers"]["file"]["load_failures"].values()) == 0
    assert stats["tiers"]["file"]["chunks"] == len(served)
    assert (stats["primary"]["pinned"], stats["primary"]["detached"]) == (0, 0)
    manager.shutdown()
    assert expected <= served, f"lost: {sorted(expected - served)}"
    return served


@pytest.mark.parametrize("number", range(CRASHES // ROUNDS))
def test_a_killed_writer_loses_nothing_that_was_stored(tmp_path: Path, number: int) -> None:
    how = ENGINES[number % len(ENGINES)]
    # Every second round of stores is too small for all chunks, and evicts.
    capacity = (AMPLE, SMALL)[number % 2]
    before: set[int] = set()
    for turn in range(ROUNDS):
        # Where nothing is evicted, chunks that were never stored are what keeps a writer busy.
        share = NUMBERS // ROUNDS
        fresh = range(turn * share, (turn + 1) * share)
        numbers = fresh if capacity == AMPLE else range(NUMBERS)
        stored, gone = crash(tmp_path, capacity, how, numbers, seed=1000 * number + turn)
        # What was evicted last was not said: of a store that evicts, only the figures are known.
        expected = before | stored - gone if capacity == AMPLE else set()
        served = check(tmp_path, capacity, how, expected)
        if capacity == AMPLE:
            assert gone == set()
        else:
            # At most what was under way is missing of a full store.
            assert len(served) >= min(len(stored), 20)
        before = served
    if number == 0:
        own = Path("/proc/self/fd")
        descriptors = [str(each.readlink()) for each in own.iterdir() if each.exists()]
        assert not [each for each in descriptors if each.startswith(str(tmp_path))]
