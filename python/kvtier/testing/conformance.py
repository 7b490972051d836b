"""What every tier must do, as tests that drive a real `Manager`.

```python
import kvtier.testing

class TestMine(kvtier.testing.TierConformance):
    persistent = True  # it keeps its chunks when it is closed

    def config(self, path, capacity_bytes):
        return {"type": "mine", "path": path, "capacity_bytes": capacity_bytes}
```

pytest runs it like any other class of tests. Nothing is timed: a tier may be slow.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar
from unittest import SkipTest

from kvtier._kvtier import HIT_PENDING, MISS
from kvtier.testing.engine import PATIENCE_S, STEP_S, Engine, batches

__all__ = ["TierConformance"]

_CHUNK = 4096
# Room for what a tier keeps beside the bytes of a chunk.
_AMPLE = 1 << 26


class TierConformance:
    """Derive from it, say how your tier is configured, and what it promises."""

    persistent: ClassVar[bool] = False
    """Chunks outlive `shutdown`, and are there when it is opened at the same path again."""
    recency: ClassVar[bool] = False
    """Evicts the chunk that was stored or touched the longest time ago."""

    def config(self, path: Path, capacity_bytes: int) -> Mapping[str, Any]:
        """Give the settings of your tier.

        What it keeps lies in `path`, a directory of its own, and takes `capacity_bytes` at most,
        if your tier knows a bound.
        """
        raise NotImplementedError(f"{type(self).__name__} must define config")

    def damage(self, path: Path) -> None:
        """Change a byte of every chunk that is kept in `path`, behind the tier's back."""
        raise SkipTest(f"damage to {path} is not defined")

    def _engine(self, path: Path, capacity_bytes: int = _AMPLE, **options: Any) -> Engine:
        return Engine(self.config(path, capacity_bytes), **{"slots": 16, **options})

    # Bytes.

    def test_bytes_come_back(self, tmp_path: Path) -> None:
        for chunk_bytes in (4096, 3 * 4096, 1 << 20):
            path = tmp_path / str(chunk_bytes)
            path.mkdir()
            engine = self._engine(path, chunk_bytes=chunk_bytes)
            numbers = list(range(8))
            engine.store(numbers)
            engine.forget()
            assert engine.bring(numbers) == numbers
            engine.close()

    def test_chunks_come_back_again_and_again_in_any_order(self, tmp_path: Path) -> None:
        engine = self._engine(tmp_path)
        engine.store(list(range(12)))
        for order in ([3, 1, 2], [11, 0], list(range(11, -1, -1)), [5, 4, 3]):
            engine.forget()
            assert engine.bring(order) == order
        engine.close()

    def test_a_chunk_that_is_stored_again_is_there_once(self, tmp_path: Path) -> None:
        engine = self._engine(tmp_path)
        for _ in range(3):
            engine.store([1, 2, 3])
            engine.forget()
        assert engine.tier["chunks"] in (0, 3)
        assert engine.bring([1, 2, 3]) == [1, 2, 3]
        engine.close()

    # Look-ups.

    def test_a_miss_is_a_miss(self, tmp_path: Path) -> None:
        engine = self._engine(tmp_path)
        assert engine.ask([1, 2, 3]) == [MISS] * 3
        engine.store([1])
        engine.forget()
        assert engine.ask([2, 3]) == [MISS] * 2
        assert engine.tier["hits"] == 0
        engine.close()

    def test_a_mixed_batch_is_answered_key_by_key(self, tmp_path: Path) -> None:
        engine = self._engine(tmp_path, slots=64)
        engine.store(list(range(0, 32, 3)))
        engine.forget()
        expected = [HIT_PENDING if number % 3 == 0 else MISS for number in range(32)]
        assert engine.ask(list(range(32))) == expected
        engine.settle()
        assert engine.compare(list(range(32))) == list(range(0, 32, 3))
        engine.close()

    def test_what_was_a_miss_is_a_hit_once_it_is_stored(self, tmp_path: Path) -> None:
        engine = self._engine(tmp_path)
        for number in range(5):
            assert engine.ask([number]) == [MISS]
            engine.store([number])
            engine.forget()
            assert engine.bring([number]) == [number]
        engine.close()

    # Room.

    def test_it_keeps_to_its_capacity(self, tmp_path: Path) -> None:
        capacity_bytes = 16 * _CHUNK
        engine = self._engine(tmp_path, capacity_bytes)
        removed = []
        for batch in batches(range(48), 4):
            engine.store(batch)
            engine.settle()
            tier = engine.tier
            if tier["capacity_bytes"] == 0:
                engine.close()
                raise SkipTest("the tier knows no bound")
            assert tier["used_bytes"] <= tier["capacity_bytes"] <= capacity_bytes
            removed += engine.removed()
        assert tier["evictions"] == len(removed)
        assert tier["chunks"] == tier["stores"] - len(removed)
        engine.forget()
        came = [number for batch in batches(range(48), 8) for number in engine.bring(batch)]
        assert len(came) == tier["chunks"] > 0
        assert not set(came) & set(removed)
        engine.close()

    def test_what_was_touched_stays(self, tmp_path: Path) -> None:
        if not self.recency:
            raise SkipTest("recency is not promised")
        engine = self._engine(tmp_path, 16 * _CHUNK)
        removed: list[int] = []
        stored = 0
        while not removed:
            assert stored < 64, "it holds more than its capacity"
            engine.store([stored])
            stored += 1
            engine.settle()
            removed += engine.removed()
        assert removed == [0]
        engine.manager.touch(1, [(1).to_bytes(16, "big")])
        engine.store([stored])
        engine.settle()
        assert engine.removed() == [2]
        engine.close()

    def test_what_is_evicted_while_it_is_wanted_is_a_miss(self, tmp_path: Path) -> None:
        engine = self._engine(tmp_path, 16 * _CHUNK, slots=64)
        for turn in range(4):
            wanted, others = (
                range(turn * 100, turn * 100 + 4),
                range(turn * 100 + 4, turn * 100 + 50),
            )
            engine.store(list(wanted))
            engine.forget()
            assert engine.ask(list(wanted)) == [HIT_PENDING] * 4
            # Its stores begin now, its loads with the next step.
            engine.store(list(others))
            engine.settle()
            engine.compare(list(wanted))
        engine.close()

    # Jobs.

    def test_many_jobs_at_once(self, tmp_path: Path) -> None:
        engine = self._engine(tmp_path, slots=256)
        old = list(batches(range(96), 6))
        for batch in old:
            engine.store(batch)
        engine.forget()
        new = list(batches(range(96, 192), 6))
        for bring, store in zip(old, new, strict=True):
            assert engine.ask(bring) == [HIT_PENDING] * len(bring)
            engine.store(store)
            engine.manager.end_step()
        engine.settle()
        assert engine.compare(list(range(96))) == list(range(96))
        engine.forget()
        assert engine.bring(list(range(192))) == list(range(192))
        engine.close()

    def test_figures_add_up(self, tmp_path: Path) -> None:
        engine = self._engine(tmp_path)
        engine.store([1, 2, 3])
        engine.forget()
        assert engine.bring([1, 2, 3, 4]) == [1, 2, 3]
        tier = engine.tier
        assert (tier["stores"], tier["loads"], tier["hits"]) == (3, 3, 3)
        assert tier["store_bytes"] == tier["load_bytes"] == 3 * engine.chunk_bytes
        assert not any(tier["store_failures"].values())
        assert not any(tier["load_failures"].values())
        assert tier["store_seconds"] >= 0
        assert tier["load_seconds"] >= 0
        assert tier["chunks"] in (0, 3)
        assert (tier["chunks"] == 0) == (tier["used_bytes"] == 0)
        engine.close()

    # Ends.

    def test_chunks_are_there_after_a_restart(self, tmp_path: Path) -> None:
        if not self.persistent:
            raise SkipTest("chunks are not kept")
        engine = self._engine(tmp_path)
        engine.store(list(range(8)))
        engine.close()
        engine = self._engine(tmp_path)
        assert engine.tier["chunks"] in (0, 8)
        assert engine.bring(list(range(9))) == list(range(8))
        engine.close()

    def test_chunks_of_another_namespace_are_not_given_out(self, tmp_path: Path) -> None:
        engine = self._engine(tmp_path, namespace="one model")
        engine.store([1, 2])
        engine.close()
        try:
            engine = self._engine(tmp_path, namespace="another model")
        except Exception:
            return  # Refused: so it should be.
        assert engine.ask([1, 2]) == [MISS] * 2
        engine.close()

    def test_a_damaged_chunk_is_a_miss_once(self, tmp_path: Path) -> None:
        engine = self._engine(tmp_path)
        engine.store([1, 2, 3])
        engine.settle()
        try:
            self.damage(tmp_path)
        except SkipTest:
            engine.close()
            raise
        engine.forget()
        assert engine.bring([1, 2, 3]) == []
        failures = engine.tier["load_failures"]
        assert sum(failures.values()) == engine.tier["hits"], failures
        assert engine.ask([1, 2, 3]) == [MISS] * 3, "the bad copies are still there"
        engine.store([1, 2, 3])
        engine.forget()
        assert engine.bring([1, 2, 3]) == [1, 2, 3]
        engine.close()

    def test_shutdown_with_jobs_under_way(self, tmp_path: Path) -> None:
        engine = self._engine(tmp_path, slots=128)
        engine.store(list(range(32)))
        engine.forget()
        engine.ask(list(range(32)))
        engine.manager.end_step()
        engine.store(list(range(32, 96)))
        engine.manager.shutdown()
        engine.manager.shutdown()
        engine.check_closed()

    def test_nothing_leaks(self, tmp_path: Path) -> None:
        def live(number: int) -> None:
            path = tmp_path / str(number)
            path.mkdir()
            engine = self._engine(path)
            engine.store([1, 2, 3])
            engine.forget()
            assert engine.bring([1, 2, 3]) == [1, 2, 3]
            engine.close()

        # The first life may begin what stays: a thread for log lines, caches.
        live(0)
        gc.collect()
        threads, descriptors = _count("task"), _count("fd")
        for number in range(1, 5):
            live(number)
        gc.collect()
        # A thread that was joined may be listed for a moment longer.
        _until(lambda: _count("task") <= threads and _count("fd") <= descriptors)


def _count(what: str) -> int:
    return len(list(Path(f"/proc/self/{what}").iterdir()))


def _until(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < end, "threads or descriptors are left"
        time.sleep(STEP_S)
