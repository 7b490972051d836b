"""The manager of any policy over real tiers against a model: what was stored under a key.

Steps store, look up, load, damage files, reset, restart on the same directory, and crash, with a
file tier that also fails by itself. Whatever happens, a key that answers HIT gives the very bytes
that were stored under it, every pin comes back, the directory never holds more than its capacity,
and without damage no chunk is lost.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

import kvtier
from kvtier import HIT, HIT_PENDING, MISS, store
from kvtier._kvtier import POLICIES

KEY_BYTES = 8
CHUNK = 4096
# What goes wrong in the file tier, besides what the steps do to its files.
FAULTS: list[dict[str, float]] = [
    {},
    {"seed": 1, "loss": 0.2, "partial": 0.2, "corrupt": 0.2, "full": 0.2},
    {"seed": 2, "lie": 0.3, "panic": 0.1, "crash_after": 12},
]
CAPACITY = 9 * 2 * CHUNK
NUMBERS = st.lists(st.integers(0, 11), min_size=1, max_size=4, unique=True)


def key(number: int) -> bytes:
    return number.to_bytes(KEY_BYTES, "big")


def content(number: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    return np.random.default_rng(number).integers(0, 256, CHUNK, np.uint8)


class TieredChunks(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.path = Path(tempfile.mkdtemp(prefix="kvtier-machine-"))
        self.request = 0
        self.damaged = False
        self.prepared: dict[int, tuple[int, int]] = {}
        self.loading: list[tuple[int, int]] = []

    @initialize(
        with_memory=st.booleans(), policy=st.sampled_from(POLICIES), faults=st.sampled_from(FAULTS)
    )
    def open(self, with_memory: bool, policy: str, faults: dict[str, float]) -> None:
        self.with_memory = with_memory
        self.policy = policy
        self.faults = faults
        self.start()

    def start(self) -> None:
        self.region = kvtier.Region(5, CHUNK, kind="anonymous")
        self.rows = np.asarray(self.region)
        tiers: list[dict[str, Any]] = [
            {"type": "file", "path": self.path, "capacity_bytes": CAPACITY, "threads": 1}
        ]
        if self.with_memory:
            tiers.insert(0, {"type": "memory", "capacity_bytes": 3 * CHUNK, "threads": 1})
        if self.faults:
            tiers[-1] = {
                "type": "faulty",
                "name": "file",
                "inner": tiers[-1],
                "faults": self.faults,
            }
        self.manager = kvtier.Manager(
            self.region, tiers, policy=self.policy, key_bytes=KEY_BYTES, namespace="m"
        )

    def next_request(self) -> int:
        self.request += 1
        return self.request

    @rule(numbers=NUMBERS)
    def prepare(self, numbers: list[int]) -> None:
        request = self.next_request()
        prepared = self.manager.prepare_store(request, [key(number) for number in numbers])
        if prepared is None:
            return
        assert not {key(number) for number in numbers} & set(prepared.evicted)
        for index, slot in zip(prepared.indices, prepared.slots, strict=True):
            self.prepared[numbers[index]] = (request, int(slot))

    @precondition(lambda self: self.prepared)
    @rule(data=st.data(), ok=st.booleans())
    def complete(self, data: st.DataObject, ok: bool) -> None:
        number = data.draw(st.sampled_from(sorted(self.prepared)))
        request, slot = self.prepared.pop(number)
        self.rows[slot] = content(number) if ok else 0
        self.manager.complete_store(request, [key(number)], ok)
        self.manager.request_finished(request)

    @rule(numbers=NUMBERS, prefix=st.booleans(), drain=st.booleans())
    def look_up(self, numbers: list[int], prefix: bool, drain: bool) -> None:
        batch = [key(number) for number in numbers]
        verb = self.manager.lookup_prefix if prefix else self.manager.lookup
        answers = verb(self.next_request(), batch).tolist()
        if prefix:
            assert MISS not in answers
        for number in numbers:
            if number in self.prepared:
                position = numbers.index(number)
                assert position >= len(answers) or answers[position] == HIT_PENDING
        if drain:
            assert self.manager.drain(30)
        else:
            self.manager.end_step()

    @rule(number=st.integers(0, 11))
    def load(self, number: int) -> None:
        request = self.next_request()
        if self.manager.lookup(request, [key(number)]).tolist() != [HIT]:
            return
        (slot,) = self.manager.prepare_load(request, [key(number)])
        assert (self.rows[slot] == content(number)).all()
        self.loading.append((request, number))

    @precondition(lambda self: self.loading)
    @rule()
    def end_load(self) -> None:
        request, number = self.loading.pop(0)
        (slot,) = self.manager.prepare_load(request, [key(number)])
        assert (self.rows[slot] == content(number)).all(), "a pinned slot was rewritten"
        for _ in range(2):
            self.manager.complete_load(request, [key(number)])
        self.manager.request_finished(request)

    @rule(numbers=NUMBERS)
    def touch(self, numbers: list[int]) -> None:
        self.manager.touch(self.next_request(), [key(number) for number in numbers])

    @rule(kind=st.sampled_from(["cut", "flip", "zeros", "gone"]), data=st.data())
    def damage(self, kind: str, data: st.DataObject) -> None:
        names = ("segment-00000", "headers", "checkpoint", "journal")
        self.damaged = True
        files = [path for name in names if (path := self.path / name).exists()]
        if not files:
            return
        path = data.draw(st.sampled_from(files))
        length = path.stat().st_size
        if kind == "gone":
            path.unlink()
            return
        with path.open("r+b") as file:
            if kind == "cut":
                file.truncate(data.draw(st.integers(0, length)))
            elif length > 0:
                place = data.draw(st.integers(0, length - 1))
                file.seek(place)
                old = file.read(64)
                file.seek(place)
                bit = 1 << data.draw(st.integers(0, 7))
                file.write(bytes([old[0] ^ bit]) if kind == "flip" else bytes(len(old)))

    @rule()
    def reset(self) -> None:
        self.manager.reset()
        self.prepared.clear()
        self.loading.clear()
        self.manager.reset_flushed()

    @rule()
    def restart(self) -> None:
        held = self.file_chunks()
        self.manager.shutdown()
        self.begin_again(held)

    @rule()
    def crash(self) -> None:
        """Goes on with the files as the kernel has them: nothing is closed or flushed."""
        held = self.file_chunks()
        left = Path(tempfile.mkdtemp(prefix="kvtier-machine-"))
        for file in self.path.iterdir():
            shutil.copyfile(file, left / file.name)
        self.manager.shutdown()
        shutil.rmtree(self.path)
        self.path = left
        self.begin_again(held)

    def begin_again(self, held: int) -> None:
        self.prepared.clear()
        self.loading.clear()
        self.start()
        if not self.damaged:
            assert self.file_chunks() == held
        assert store.inspect(self.path)["damaged_headers"] == 0

    def file_chunks(self) -> int:
        return int(self.manager.stats()["tiers"]["file"]["chunks"])

    @invariant()
    def holds(self) -> None:
        if not hasattr(self, "manager"):
            return
        self.manager.validate()
        # What a later step may draw must not depend on how fast a disk is: each begins settled.
        # (`make interleavings` is about steps that do not.)
        assert self.manager.drain(30)
        self.manager.validate()
        for tier in self.manager.stats()["tiers"].values():
            assert tier["used_bytes"] <= tier["capacity_bytes"]
        assert sum(path.stat().st_size for path in self.path.iterdir()) <= CAPACITY

    def teardown(self) -> None:
        if hasattr(self, "manager"):
            while self.loading:
                request, number = self.loading.pop()
                self.manager.complete_load(request, [key(number)])
            for number, (request, _) in self.prepared.items():
                self.manager.complete_store(request, [key(number)], False)
            assert self.manager.drain(30)
            stats = self.manager.stats()["primary"]
            assert (stats["pinned"], stats["writing"], stats["detached"]) == (0, 0, 0)
            self.manager.shutdown()
        shutil.rmtree(self.path)


TestTieredChunks = TieredChunks.TestCase
TestTieredChunks.settings = settings(max_examples=90, stateful_step_count=40)
