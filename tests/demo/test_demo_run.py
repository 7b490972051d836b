"""`run_demo` in this process, with the store or the host memory damaged between turns."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvtier import Region
from kvtier.demo import run
from kvtier.demo.options import DemoOptions, ModelSizes
from kvtier.demo.records import DemoReport, TurnRecord
from kvtier.errors import ConfigError, StoreIdentityError
from kvtier.store import inspect, verify


def small(directory: Path | None, **changes: Any) -> DemoOptions:
    """Two sessions that push each other out of the GPU pool and out of host memory."""
    options = DemoOptions(
        sessions=2,
        turns=2,
        new_tokens=4,
        context_tokens=256,
        block_size=4,
        blocks_per_chunk=4,
        model=ModelSizes(layers=2, d_model=64, heads=4, kv_heads=2),
        host_bytes=8 * 16384,
        directory=directory,
        threads=1,
    )
    return dataclasses.replace(options, **changes)


def segments(directory: Path) -> list[Path]:
    return sorted(directory.glob("segment-*"))


def test_every_reused_turn_is_the_recomputed_one(tmp_path: Path) -> None:
    store = tmp_path / "new" / "store"
    records: list[TurnRecord] = []
    report = run.run_demo(small(store), on_turn_end=records.append)
    assert report.turns == records
    assert [(turn.session, turn.turn) for turn in records] == [(0, 0), (1, 0), (0, 1), (1, 1)]
    for turn in records:
        assert turn.bytes_equal is turn.tokens_equal is (any(turn.reused.values()) or None)
        assert all(count % 16 == 0 for count in turn.reused.values())
        assert sum(turn.reused.values()) < turn.context_tokens
    assert report.bytes_equal
    assert report.tokens_equal
    assert records[2].reused["file"] > 0
    assert report.stats["tiers"]["file"]["load_failures"]["corrupt"] == 0
    assert not report.warm_start
    assert report.warm_chunks == 0
    assert inspect(store)["chunks"] == report.stats["tiers"]["file"]["chunks"] > 0


def test_host_memory_and_disk_share_a_returning_session() -> None:
    """The default pools: of a session that returns, a part is in each."""
    options = small(None, sessions=6, turns=3, host_bytes=None)
    report = run.run_demo(options)
    returning = [turn for turn in report.turns if turn.turn > 0]
    assert sum(turn.reused["primary"] for turn in returning) > 0
    assert sum(turn.reused["file"] for turn in returning) > 0
    assert report.bytes_equal
    assert report.tokens_equal


def test_a_second_run_starts_warm(tmp_path: Path) -> None:
    cold = run.run_demo(small(tmp_path))
    warm = run.run_demo(small(tmp_path))
    assert warm.warm_start
    assert warm.warm_chunks == cold.stats["tiers"]["file"]["chunks"]
    for turn in warm.turns:
        assert turn.tokens_equal
        assert turn.bytes_equal
        assert sum(turn.reused.values()) == (turn.context_tokens - 1) // 16 * 16


def test_another_identity_is_refused(tmp_path: Path) -> None:
    run.run_demo(small(tmp_path))
    before = inspect(tmp_path)
    with pytest.raises(StoreIdentityError):
        run.run_demo(small(tmp_path, seed=1))
    assert inspect(tmp_path)["chunks"] == before["chunks"]
    assert verify(tmp_path).good


def cut(path: Path) -> None:
    with path.open("r+b") as file:
        file.truncate(100)


def zero(path: Path) -> None:
    length = path.stat().st_size
    with path.open("r+b") as file:
        file.write(bytes(length))


def flip_a_bit_a_page(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[1234::4096] = bytes(byte ^ 0x08 for byte in data[1234::4096])
    with path.open("r+b") as file:
        file.write(data)


@pytest.mark.parametrize("damage", [cut, zero, flip_a_bit_a_page])
def test_damaged_files_are_counted_misses(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    def after(record: TurnRecord) -> None:
        if (record.session, record.turn) == (1, 0):
            for path in segments(tmp_path):
                damage(path)

    report = run.run_demo(small(tmp_path), on_turn_end=after)
    _check_recovered(report)
    # What was recomputed was stored again: the next run finds nothing wrong.
    again = run.run_demo(small(tmp_path))
    assert again.tokens_equal
    assert again.bytes_equal


def _check_recovered(report: DemoReport) -> None:
    assert report.tokens_equal
    assert report.bytes_equal
    returned = next(turn for turn in report.turns if (turn.session, turn.turn) == (0, 1))
    assert returned.reused["file"] == 0
    tier = report.stats["tiers"]["file"]
    assert tier["load_failures"]["corrupt"] > 0


def test_a_wrong_byte_in_host_memory_is_a_reported_difference(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Host memory has no checksum of its own: this is what the judge is for."""
    regions: list[Region] = []

    def keep(slots: int, slot_bytes: int, *, prefault_threads: int) -> Region:
        regions.append(Region(slots, slot_bytes, prefault_threads=prefault_threads))
        return regions[-1]

    monkeypatch.setattr(run, "Region", keep)

    def after(record: TurnRecord) -> None:
        if (record.session, record.turn) == (1, 0):
            view = memoryview(regions[0]).cast("B")
            for slot in range(regions[0].slots):
                view[slot * regions[0].slot_bytes + 7] ^= 0x01

    report = run.run_demo(small(None, host_bytes=2**22), on_turn_end=after)
    assert not report.bytes_equal
    assert report.differences
    assert report.differences[0].startswith("session 0, turn 1: layer layers.0, block ")
    assert "byte 7: 0x" in report.differences[0]


def test_a_gpu_that_is_not_there(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(ConfigError, match="no usable GPU"):
        run.run_demo(small(tmp_path / "store", device="cuda"))
    assert not (tmp_path / "store").exists()


def test_an_error_in_the_middle_leaves_no_directory(tmp_path: Path) -> None:
    class StopError(Exception):
        pass

    def stop(_record: TurnRecord) -> None:
        raise StopError

    monitored = tmp_path / "tmp"
    monitored.mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tempfile.tempdir", str(monitored))
        with pytest.raises(StopError):
            run.run_demo(small(None), on_turn_end=stop)
    assert list(monitored.iterdir()) == []
