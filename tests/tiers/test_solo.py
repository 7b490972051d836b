"""What other engines' managers use: one tier over their memory, one policy over their slots."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from tests.tiers.plain import KEY_BYTES, Plain, keys

import kvtier
from kvtier import HIT, MISS, TierContext, TierJob
from kvtier._kvtier import POLICIES, Evictor, SoloTier, chunk_checksum
from kvtier.errors import (
    ClosedError,
    ConfigError,
    DuplicateKeyError,
    KeyLengthError,
    KeyNotReadyError,
    KeyStateError,
    TierError,
    UnknownKeyError,
)

SLOTS, SLOT = 4, 4096


@pytest.fixture
def memory() -> memoryview:
    """Of somebody else, in whole pages."""
    return memoryview(kvtier.Region(SLOTS, SLOT, kind="anonymous"))


@pytest.fixture
def solo(memory: memoryview) -> Iterator[SoloTier]:
    tier = {"type": "memory", "capacity_bytes": 8 * SLOT}
    made = SoloTier(memory, tier, key_bytes=KEY_BYTES, events=True)
    yield made
    made.shutdown()


def test_chunks_go_and_come_back_into_other_slots(memory: memoryview, solo: SoloTier) -> None:
    slots = np.asarray(memory)
    slots[0], slots[1] = 7, 8
    solo.submit_store(1, 1, keys(1, 2), [0, 1])
    assert solo.wait(30)
    assert solo.finished()[0][:3] == (1, [], 2 * SLOT)
    assert [solo.lookup_key(1, key) for key in keys(1, 2, 3)] == [HIT, HIT, MISS]
    solo.submit_load(2, 1, keys(2, 3), [2, 3])
    assert solo.wait(30)
    job, lost, moved, seconds = solo.finished()[0]
    assert (job, lost, moved) == (2, [1], SLOT)
    assert seconds > 0
    assert (slots[2] == 8).all()
    assert ("stored", keys(1, 2)) in solo.take_events()
    assert (solo.medium, solo.locality) == ("memory", "local")


def test_memory_is_kept_until_shutdown_and_given_back_then() -> None:
    owner = memoryview(bytearray((SLOTS + 1) * SLOT))
    start = -np.frombuffer(owner, np.uint8).ctypes.data % SLOT
    pages = owner[start : start + SLOTS * SLOT].cast("B", (SLOTS, SLOT))
    tier = {"type": "memory", "capacity_bytes": 8 * SLOT}
    solo = SoloTier(pages, tier, key_bytes=KEY_BYTES)
    with pytest.raises(BufferError):
        pages.release()
    solo.shutdown()
    solo.shutdown()
    pages.release()
    with pytest.raises(ClosedError):
        solo.lookup_key(1, keys(1)[0])


def test_calls_that_can_not_be_are_refused(memory: memoryview, solo: SoloTier) -> None:
    for slots in ([], [0, 1], [SLOTS]):
        with pytest.raises(TierError, match="one different slot"):
            solo.submit_load(1, 1, keys(1), slots)
    with pytest.raises(KeyLengthError):
        solo.lookup_key(1, b"short")
    with pytest.raises(KeyLengthError):
        solo.submit_store(1, 1, [b"short"], [0])
    assert solo.finished() == []
    with pytest.raises(ConfigError, match="missing field `path`"):
        SoloTier(memory, {"type": "file", "capacity_bytes": 1}, key_bytes=KEY_BYTES)
    others: list[Any] = [bytes(SLOT), np.asarray(memory)[:, :100], memory.cast("B")]
    for given in others:
        with pytest.raises(BufferError, match="expected memory"):
            SoloTier(given, {"type": "memory", "capacity_bytes": SLOT}, key_bytes=KEY_BYTES)


def test_a_python_tier_can_address_the_region_and_check_a_chunk() -> None:
    """`TierJob.slots` are those of its chunks, and `chunk_checksum` is what the core compares."""
    region = kvtier.Region(SLOTS, SLOT)
    seen: list[bool] = []

    class Addressing(Plain):
        def __init__(self, context: TierContext) -> None:
            super().__init__(context)
            self.rows = memoryview(region)

        def submit_store(self, job: TierJob) -> None:
            for key, slot, chunk, checksum in zip(
                job.keys, job.slots, job.chunks, job.checksums, strict=True
            ):
                row = self.rows.cast("B")[slot * SLOT : (slot + 1) * SLOT]
                seen.append(row == chunk and chunk_checksum(key, row) == checksum)
            super().submit_store(job)

    Addressing.made = []
    kvtier.register_tier("addressing", Addressing)
    manager = kvtier.Manager(region, [{"type": "addressing"}], key_bytes=KEY_BYTES)
    prepared = manager.prepare_store(1, keys(1, 2, 3))
    assert prepared is not None
    np.asarray(memoryview(region))[prepared.slots] = np.array([[4], [5], [6]], np.uint8)
    manager.complete_store(1, keys(1, 2, 3))
    assert manager.drain(30)
    assert seen == [True] * 3
    manager.shutdown()


@pytest.mark.parametrize("policy", POLICIES)
def test_an_evictor_says_who_goes(policy: str) -> None:
    evictor = Evictor(8, KEY_BYTES, policy)
    assert evictor.key_bytes == KEY_BYTES
    for key in keys(*range(8)):
        evictor.insert(1, key)
    assert evictor.evict(1, []) is None, "all are being written"
    for key in keys(*range(8)):
        evictor.let_go(key)
    evictor.hold(keys(0)[0])
    evictor.touch(2, keys(1, 99))
    gone = evictor.evict(5, keys(2))
    assert gone is not None
    assert len(set(gone)) == 5
    assert not set(gone) & set(keys(0, 2))
    assert evictor.evict(2, keys(2)) is None
    evictor.finish(1)
    evictor.validate()


def test_an_evictor_refuses_a_call_out_of_turn() -> None:
    evictor = Evictor(1, KEY_BYTES, "lru")
    (one, other) = keys(1, 2)
    evictor.insert(0, one)
    calls: list[tuple[Callable[[], None], type[Exception]]] = [
        (lambda: evictor.insert(0, one), DuplicateKeyError),
        (lambda: evictor.insert(0, other), KeyStateError),
        (lambda: evictor.hold(one), KeyNotReadyError),
        (lambda: evictor.remove(other), UnknownKeyError),
    ]
    for call, error in calls:
        with pytest.raises(error):
            call()
    evictor.let_go(one)
    with pytest.raises(KeyStateError):
        evictor.let_go(one)
    with pytest.raises(ConfigError, match="unknown policy"):
        Evictor(1, KEY_BYTES, "mru")
