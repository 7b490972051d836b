"""`kvtier.store`, `kvtier verify` and `kvtier inspect` on stores, good and bad."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvtier
from kvtier import errors, store
from kvtier.cli import main

KEY_BYTES = 8
CHUNK = 8192
NAMESPACE = json.dumps({"model": "m", "tokens_per_chunk": 128})


def key(number: int) -> bytes:
    return number.to_bytes(KEY_BYTES, "little")


def open_manager(path: Path, **options: Any) -> kvtier.Manager:
    tier = {"type": "file", "path": path, "capacity_bytes": 1 << 20, **options}
    region = kvtier.Region(4, CHUNK)
    return kvtier.Manager(region, [tier], key_bytes=KEY_BYTES, namespace=NAMESPACE)


def put(manager: kvtier.Manager, *numbers: int) -> None:
    batch = [key(number) for number in numbers]
    prepared = manager.prepare_store(1, batch)
    assert prepared is not None
    np.asarray(manager.region)[prepared.slots] = [[number] for number in numbers]
    manager.complete_store(1, batch)
    assert manager.drain(30)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A closed store of three chunks in its first three slots."""
    manager = open_manager(tmp_path)
    put(manager, 1, 2, 3)
    manager.shutdown()
    return tmp_path


def flip(path: Path, place: int) -> None:
    with path.open("r+b") as file:
        file.seek(place)
        byte = file.read(1)[0]
        file.seek(place)
        file.write(bytes([byte ^ 0x10]))


def test_a_good_store(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", str(path)]) == 0
    assert f"{path}: 3 of 3 chunks are good\n" in capsys.readouterr().out
    assert main(["verify", "--json", str(path)]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found == {"chunks": 3, "ok": 3, "corrupt": [], "files": [], "repaired": 0}


DAMAGES: list[tuple[str, Callable[[Path], None], list[int | None]]] = [
    ("payload", lambda path: flip(path / "segment-00000", CHUNK + 1), [2]),
    ("header", lambda path: flip(path / "headers", 2 * 128 + 30), [None]),
    ("segment cut", lambda path: os.truncate(path / "segment-00000", 2 * CHUNK), [3]),
    ("segment gone", lambda path: (path / "segment-00000").unlink(), [1, 2, 3]),
    ("journal", lambda path: flip(path / "journal", 60), [None]),
    ("checkpoint", lambda path: flip(path / "checkpoint", 3), [None]),
    ("headers gone", lambda path: (path / "headers").unlink(), [None]),
]


@pytest.mark.parametrize(("what", "damage", "expected"), DAMAGES, ids=[each[0] for each in DAMAGES])
def test_verify_finds_each_planted_fault(
    path: Path,
    capsys: pytest.CaptureFixture[str],
    what: str,
    damage: Callable[[Path], None],
    expected: list[int | None],
) -> None:
    damage(path)
    assert main(["verify", "--json", str(path)]) == 1
    found = json.loads(capsys.readouterr().out)
    named = [finding["key"] for finding in (*found["corrupt"], *found["files"])]
    assert named == [None if number is None else key(number).hex() for number in expected], what
    assert found["repaired"] == 0
    assert main(["verify", str(path)]) == 1
    assert "bad" in capsys.readouterr().out
    # Opening mends what a repair would drop, and never serves it.
    manager = open_manager(path)
    answers = manager.lookup(1, [key(1), key(2), key(3)])
    assert manager.drain(30)
    rows = np.asarray(manager.region)
    for number, answer in enumerate(answers.tolist(), 1):
        if answer != kvtier.MISS and manager.lookup_key(2, key(number)) == kvtier.HIT:
            (slot,) = manager.prepare_load(2, [key(number)])
            assert (rows[slot] == number).all()
            manager.complete_load(2, [key(number)])
    manager.shutdown()


def test_repair_drops_and_says_so(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flip(path / "segment-00000", 5)
    flip(path / "headers", 128 + 5)
    assert main(["verify", "--repair", "--json", str(path)]) == 1
    found = json.loads(capsys.readouterr().out)
    assert (found["chunks"], found["ok"], found["repaired"]) == (3, 1, 2)
    assert main(["verify", "--json", str(path)]) == 0
    assert json.loads(capsys.readouterr().out)["chunks"] == 1


def test_inspect_shows_what_is_there(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    manager = open_manager(path)
    for _ in range(3):
        assert manager.lookup(1, [key(2)]).tolist() != [kvtier.MISS]
        assert manager.drain(30)
    assert main(["inspect", "--json", str(path)]) == 0
    found = json.loads(capsys.readouterr().out)
    assert set(found) == set(store.Inspection.__annotations__)
    assert found["namespace"] == json.loads(NAMESPACE)
    assert (found["chunks"], found["owner"]) == (3, str(os.getpid()))
    assert found["used_bytes"] == 3 * CHUNK
    on_disk = sum(file.stat().st_size for file in path.iterdir())
    assert on_disk == found["allocated_bytes"] <= found["capacity_bytes"] == 1 << 20
    assert sum(found["ages_s"]["counts"]) == 3
    manager.shutdown()
    assert main(["inspect", str(path)]) == 0
    shown = capsys.readouterr().out
    for part in ("nobody has it open", '"tokens_per_chunk": 128', "3 chunks of", "loads:", "<= 1"):
        assert part in shown


def test_damage_is_counted_by_inspect(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flip(path / "headers", 10)
    flip(path / "journal", 10)
    assert main(["inspect", str(path)]) == 0
    assert "damaged: 1 headers, 1 pages" in capsys.readouterr().out


def _no_store(path: Path) -> None:
    for file in path.iterdir():
        file.unlink()


def _older(path: Path) -> None:
    (path / "kvtier.json").write_text('{"format": 1, "namespace": ""}')


def _unreadable(path: Path) -> None:
    flip(path / "kvtier.json", 20)


@pytest.mark.parametrize("command", ["verify", "inspect"])
@pytest.mark.parametrize(
    ("change", "part"),
    [
        (_no_store, "kvtier.json"),
        (_older, "format version 1, this version of kvtier has format 2"),
        (_unreadable, "does not say whose store it is"),
    ],
)
def test_what_can_not_be_looked_into(
    path: Path,
    capsys: pytest.CaptureFixture[str],
    command: str,
    change: Callable[[Path], None],
    part: str,
) -> None:
    change(path)
    before = sorted(file.name for file in path.iterdir())
    assert main([command, str(path)]) == 2
    error = capsys.readouterr().err
    assert part in error
    assert error.count("\n") == 1
    assert sorted(file.name for file in path.iterdir()) == before


def test_errors_have_their_classes(path: Path) -> None:
    _older(path)
    with pytest.raises(errors.StoreFormatError):
        open_manager(path)
    (path / "kvtier.json").write_text("?")
    with pytest.raises(errors.StoreDamagedError):
        open_manager(path)


def test_verify_leaves_a_store_alone_that_is_open(
    path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    manager = open_manager(path)
    assert main(["verify", str(path)]) == 2
    assert str(os.getpid()) in capsys.readouterr().err
    manager.shutdown()
    assert main(["verify", str(path)]) == 0


@pytest.mark.parametrize(
    ("options", "part"),
    [
        ({"io": "dma"}, "uring"),
        ({"direct": "yes"}, "direct"),
        ({"policy": "magic"}, "use one of lru"),
        ({"flush_interval_s": -1}, "flush_interval_s = -1"),
        ({"io": "mmap", "direct": True}, "page cache"),
    ],
)
def test_settings_that_cannot_be(tmp_path: Path, options: dict[str, Any], part: str) -> None:
    with pytest.raises(errors.ConfigError, match=part):
        open_manager(tmp_path, **options)


@pytest.mark.parametrize("io", ["threads", "mmap", "auto"])
@pytest.mark.parametrize("direct", ["auto", False])
def test_every_engine_serves_the_same_store(path: Path, io: str, direct: Any) -> None:
    manager = open_manager(path, io=io, direct=direct, policy="arc", flush_interval_s=0.01)
    assert manager.lookup(1, [key(1), key(3)]).tolist() == [kvtier.HIT_PENDING] * 2
    assert manager.drain(30)
    slots = manager.prepare_load(1, [key(1), key(3)])
    assert np.asarray(manager.region)[slots, 17].tolist() == [1, 3]
    manager.complete_load(1, [key(1), key(3)])
    manager.shutdown()


@pytest.fixture
def nobodys(path: Path) -> Iterator[tuple[Path, int | None]]:
    """The store where another user can read it and not write it, and that user if we are root."""
    with tempfile.TemporaryDirectory() as name:
        copy = Path(name)
        for file in path.iterdir():
            (copy / file.name).write_bytes(file.read_bytes())
            (copy / file.name).chmod(0o444)
        copy.chmod(0o555)
        yield copy, 65534 if os.getuid() == 0 else None
        copy.chmod(0o755)


def test_a_read_only_directory_is_refused_and_can_be_looked_into(
    nobodys: tuple[Path, int | None],
) -> None:
    path, user = nobodys
    # The packages are read before the user changes, who may have no right to.
    code = f"""
import json
import os
import kvtier.store
from kvtier.errors import StoreReadOnlyError
kvtier.Manager(kvtier.Region(1, {CHUNK})).shutdown()
if {user!r}:
    os.setuid({user!r})
assert kvtier.store.inspect({str(path)!r})["chunks"] == 3
assert kvtier.store.verify({str(path)!r}).good
tier = {{"type": "file", "path": {str(path)!r}, "capacity_bytes": 1 << 20}}
region = kvtier.Region(4, {CHUNK})
try:
    kvtier.Manager(region, [tier], key_bytes={KEY_BYTES}, namespace={NAMESPACE!r})
except StoreReadOnlyError as error:
    print(error)
"""
    before = {file.name: file.read_bytes() for file in path.iterdir()}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "can not be written" in done.stdout
    assert {file.name: file.read_bytes() for file in path.iterdir()} == before
