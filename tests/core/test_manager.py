from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any, get_type_hints

import numpy as np
import pytest

import kvtier
from kvtier import HIT, HIT_PENDING, MISS, errors
from kvtier.config import PrimaryStats, TierStats

KEY_BYTES = 8


def keys(*numbers: int) -> list[bytes]:
    return [number.to_bytes(KEY_BYTES, "little") for number in numbers]


def make(slots: int = 4, tiers: Any = (), **options: Any) -> kvtier.Manager:
    return kvtier.Manager(kvtier.Region(slots, 4096), tiers, key_bytes=KEY_BYTES, **options)


def store(manager: kvtier.Manager, request: int, *numbers: int) -> None:
    batch = keys(*numbers)
    prepared = manager.prepare_store(request, batch)
    assert prepared is not None
    rows = np.asarray(manager.region)
    for index, slot in zip(prepared.indices, prepared.slots, strict=True):
        rows[slot] = numbers[index] % 256
    manager.complete_store(request, [batch[index] for index in prepared.indices])


def file_tier(path: Path, **options: Any) -> dict[str, Any]:
    return {"type": "file", "path": path, "capacity_bytes": 1 << 20, **options}


def test_a_chunk_comes_back_from_disk_in_a_new_process_life(tmp_path: Path) -> None:
    manager = make(tiers=[file_tier(tmp_path)], namespace="a")
    store(manager, 1, 1, 2, 3)
    assert manager.drain(30)
    manager.shutdown()
    manager = make(tiers=[file_tier(tmp_path)], namespace="a")
    assert manager.lookup_prefix(1, keys(1, 2, 9, 3)).tolist() == [HIT_PENDING] * 2
    assert manager.drain(30)
    assert manager.lookup(1, keys(1, 2, 3)).tolist() == [HIT, HIT, HIT_PENDING]
    slots = manager.prepare_load(1, keys(1, 2))
    assert np.asarray(manager.region)[slots, 17].tolist() == [1, 2]
    manager.complete_load(1, keys(1, 2))
    manager.shutdown()


def test_keys_as_array_tuple_and_list_are_the_same() -> None:
    manager = make()
    store(manager, 1, 1, 2)
    batch = keys(1, 2, 3)
    array = np.frombuffer(b"".join(batch), np.uint8).reshape(3, KEY_BYTES)
    for given in (batch, tuple(batch), array):
        assert manager.lookup(1, given).tolist() == [HIT, HIT, MISS]


def test_keys_of_the_wrong_kind_are_named() -> None:
    manager = make()
    with pytest.raises(errors.KeyLengthError, match=r"key 1 \(6162\) has 2 bytes"):
        manager.lookup(1, [keys(1)[0], b"ab"])
    with pytest.raises(errors.KeyLengthError, match="keys of 5 bytes"):
        manager.lookup(1, np.zeros((2, 5), np.uint8))
    for wrong in (b"12345678", "12345678", bytearray(8), 5, [1], np.zeros((2, 8), np.int64)):
        with pytest.raises(TypeError, match="expected"):
            manager.lookup(1, wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda m: m.complete_store(1, keys(1)), errors.KeyStateError),
        (lambda m: m.complete_load(1, keys(1)), errors.KeyStateError),
        (lambda m: m.complete_store(1, keys(9)), errors.UnknownKeyError),
        (lambda m: m.prepare_load(1, keys(1, 9)), errors.UnknownKeyError),
        (lambda m: m.prepare_load(1, keys(2)), errors.KeyNotReadyError),
        (lambda m: m.prepare_load(1, keys(1, 1)), errors.DuplicateKeyError),
        (lambda m: m.prepare_store(1, keys(7, 7)), errors.DuplicateKeyError),
        (lambda m: m.wait(-1), errors.ConfigError),
        (lambda m: m.drain(float("nan")), errors.ConfigError),
    ],
)
def test_a_refused_call_changes_nothing(call: Any, error: type[Exception]) -> None:
    manager = make()
    store(manager, 1, 1)
    manager.prepare_store(2, keys(2))
    before = manager.stats()
    with pytest.raises(error):
        call(manager)
    assert manager.stats() == before
    manager.validate()


def test_every_error_is_a_kvtier_error_and_documented() -> None:
    for name in errors.__all__:
        error = getattr(errors, name)
        assert issubclass(error, kvtier.KvTierError)
        assert error.__doc__


@pytest.mark.parametrize(
    ("tiers", "part"),
    [
        ([{"type": "tape"}], "expected `memory` or `file`"),
        ([{"type": "memory"}], "missing field `capacity_bytes`"),
        ([{"type": "memory", "capacity_bytes": 1}], "at least 4096"),
        ([{"type": "memory", "capacity_bytes": "1G"}], "invalid type"),
        ([{"type": "memory", "capacity_bytes": 1 << 20, "size": 1}], "unknown field `size`"),
        ([{"type": "file", "path": object(), "capacity_bytes": 1}], "PathLike"),
        ([3], "expected a list of objects"),
    ],
)
def test_tiers_that_cannot_be(tiers: Any, part: str) -> None:
    with pytest.raises(errors.ConfigError, match=part):
        make(tiers=tiers)


def test_other_settings_that_cannot_be() -> None:
    with pytest.raises(errors.ConfigError, match="use one of lru"):
        make(policy="magic")
    for threshold in (0, 256):
        with pytest.raises(errors.ConfigError, match="not 1 to 255"):
            make(store_threshold=threshold)
    for key_bytes in (0, 7, 65):
        with pytest.raises(errors.ConfigError, match="8 to 64"):
            kvtier.Manager(kvtier.Region(1, 4096), key_bytes=key_bytes)


def test_another_namespace_is_refused_with_both_shown(tmp_path: Path) -> None:
    make(tiers=[file_tier(tmp_path)], namespace="model-a").shutdown()
    with pytest.raises(errors.StoreIdentityError, match=r"(?s)model-a.*model-b"):
        make(tiers=[file_tier(tmp_path)], namespace="model-b")


def test_a_second_owner_is_told_the_pid(tmp_path: Path) -> None:
    manager = make(tiers=[file_tier(tmp_path)])
    with pytest.raises(errors.StoreLockedError, match=str(os.getpid())):
        make(tiers=[file_tier(tmp_path)])
    manager.shutdown()
    make(tiers=[file_tier(tmp_path)]).shutdown()


@pytest.mark.parametrize("damage", ["cut", "zeros", "flip"])
def test_a_damaged_file_is_a_counted_miss(tmp_path: Path, damage: str) -> None:
    manager = make(slots=2, tiers=[file_tier(tmp_path)], events=True)
    store(manager, 1, 1)
    assert manager.drain(30)
    with (tmp_path / "segment-00000").open("r+b") as segment:
        if damage == "cut":
            segment.truncate(4095)
        elif damage == "zeros":
            segment.write(bytes(4096))
        else:
            segment.seek(4095)
            segment.write(b"\0")
    store(manager, 1, 2, 3)
    assert manager.drain(30)
    assert manager.lookup(1, keys(1)).tolist() == [HIT_PENDING]
    assert manager.drain(30)
    assert manager.lookup(1, keys(1)).tolist() == [MISS]
    stats = manager.stats()["tiers"]["file"]
    assert {name: n for name, n in stats["load_failures"].items() if n} == {"corrupt": 1}
    assert ("removed", "file", keys(1)) in manager.take_events()
    assert stats["chunks"] == 2
    manager.validate()
    manager.shutdown()


def test_stats_have_the_documented_fields(tmp_path: Path) -> None:
    manager = make(tiers=[file_tier(tmp_path, name="disk")])
    stats = manager.stats()
    assert set(stats["primary"]) == set(get_type_hints(PrimaryStats))
    assert list(stats["tiers"]) == ["disk"]
    assert set(stats["tiers"]["disk"]) == set(get_type_hints(TierStats))
    manager.shutdown()


def test_events_tell_of_every_tier() -> None:
    manager = make(tiers=[{"type": "memory", "capacity_bytes": 8192}], events=True)
    store(manager, 1, 1)
    assert manager.drain(30)
    assert manager.take_events() == [("stored", "primary", keys(1)), ("stored", "memory", keys(1))]
    assert manager.take_events() == []
    assert make().take_events() == []


def test_after_shutdown_every_verb_is_closed() -> None:
    manager = make(tiers=[{"type": "memory", "capacity_bytes": 8192}])
    manager.shutdown()
    manager.shutdown()
    for call in (
        lambda: manager.lookup(1, keys(1)),
        lambda: manager.prepare_store(1, keys(1)),
        lambda: manager.end_step(),
        lambda: manager.wait(0),
        lambda: manager.drain(0),
    ):
        with pytest.raises(errors.ClosedError):
            call()


def test_many_threads_at_once() -> None:
    manager = make(slots=64, tiers=[{"type": "memory", "capacity_bytes": 1 << 22}])
    failures: list[BaseException] = []

    def work(request: int) -> None:
        try:
            rows = np.asarray(manager.region)
            for turn in range(40):
                numbers = [request * 1000 + turn * 4 + at for at in range(4)]
                prepared = manager.prepare_store(request, keys(*numbers))
                if prepared is None:
                    continue
                rows[prepared.slots] = request
                manager.complete_store(request, keys(*numbers))
                manager.end_step()
                try:
                    slots = manager.prepare_load(request, keys(*numbers[:2]))
                except errors.UnknownKeyError:
                    continue
                assert (rows[slots] == request).all()
                manager.complete_load(request, keys(*numbers[:2]))
            manager.request_finished(request)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert manager.drain(30)
    manager.validate()
    stats = manager.stats()["primary"]
    assert (stats["pinned"], stats["writing"], stats["requests"]) == (0, 0, 0)
    manager.shutdown()


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_fork_is_refused_and_the_child_ends_cleanly() -> None:
    manager = make(tiers=[{"type": "memory", "capacity_bytes": 1 << 20}])
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            manager.end_step()
        except errors.ForkError as error:
            os.write(writer, str(error).encode())
        # Dropped in the child: must neither hang nor crash.
        del manager
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        message = pipe.read().decode()
    assert os.waitpid(pid, 0)[1] == 0
    assert "spawn" in message
    store(manager, 1, 1)
    assert manager.drain(30)
    manager.shutdown()


def serve(path: str, ready: Any, go_on: Any) -> None:
    manager = make(tiers=[file_tier(Path(path))])
    store(manager, 1, 1)
    manager.drain(30)
    ready.set()
    go_on.wait()
    manager.shutdown()


def test_spawn_works_and_the_lock_dies_with_its_owner(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    ready, go_on = context.Event(), context.Event()
    worker = context.Process(target=serve, args=(str(tmp_path), ready, go_on))
    worker.start()
    assert ready.wait(60)
    with pytest.raises(errors.StoreLockedError, match=str(worker.pid)):
        make(tiers=[file_tier(tmp_path)])
    worker.kill()
    worker.join()
    manager = make(tiers=[file_tier(tmp_path)])
    assert manager.lookup(1, keys(1)).tolist() == [HIT_PENDING]
    manager.shutdown()


def test_import_is_light() -> None:
    code = (
        "import sys, threading, kvtier; "
        "print('torch' in sys.modules, threading.active_count(), kvtier.build_profile)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False 1 release\n"
