from __future__ import annotations

import gc
import multiprocessing
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import kvtier
from kvtier.errors import ConfigError, RegionError


def write_seven(name: str) -> None:
    np.asarray(kvtier.Region.attach(name))[1, 4095] = 7


def test_views_share_the_mapping() -> None:
    region = kvtier.Region(3, 5000)
    assert (region.slots, region.slot_bytes, region.nbytes) == (3, 8192, 3 * 8192)
    view = memoryview(region)
    assert (view.shape, view.format, view.readonly) == ((3, 8192), "B", False)
    array = np.asarray(region)
    assert array.ctypes.data == region.data_ptr
    array[2, 5] = 9
    assert view[2, 5] == 9
    assert bytes(memoryview(region).cast("B")[2 * 8192 + 5 : 2 * 8192 + 6]) == b"\x09"


def test_a_view_outlives_the_region() -> None:
    region = kvtier.Region(2, 4096)
    array = np.asarray(region)
    del region
    gc.collect()
    array[1] = 3
    assert array.sum() == 3 * 4096


def test_another_process_attaches_by_name() -> None:
    region = kvtier.Region(2, 4096)
    assert region.name is not None
    worker = multiprocessing.get_context("spawn").Process(target=write_seven, args=(region.name,))
    worker.start()
    worker.join()
    assert worker.exitcode == 0
    assert np.asarray(region)[1, 4095] == 7


def test_nothing_is_left_behind_by_sigkill() -> None:
    before = sorted(Path("/dev/shm").iterdir())
    code = "import kvtier; r = kvtier.Region(4, 4096); print(r.name, flush=True); input()"
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdin is not None
    name = process.stdout.readline().strip()
    other = kvtier.Region.attach(name)
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdin.close()
    process.stdout.close()
    assert sorted(Path("/dev/shm").iterdir()) == before
    np.asarray(other)[:] = 1
    with pytest.raises(RegionError, match="memfd"):
        kvtier.Region.attach(name)


def test_anonymous_has_no_name() -> None:
    region = kvtier.Region(1, 4096, kind="anonymous", prefault_threads=2)
    assert region.name is None
    assert not np.asarray(region).any()


@pytest.mark.parametrize(
    ("slots", "slot_bytes", "kind", "error", "part"),
    [
        (0, 4096, "memfd", ConfigError, "at least one slot"),
        (1, 0, "memfd", ConfigError, "at least one slot"),
        (1, 4096, "paper", ConfigError, 'use "memfd" or "anonymous"'),
        (2**32 - 1, 2**40, "memfd", ConfigError, "address space"),
        (2**20, 2**30, "memfd", RegionError, "use fewer slots"),
    ],
)
def test_what_cannot_be_made(
    slots: int, slot_bytes: int, kind: str, error: type[Exception], part: str
) -> None:
    with pytest.raises(error, match=part):
        kvtier.Region(slots, slot_bytes, kind=kind)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["", "x", "memfd:1", "memfd:999999999:3:1:4096"])
def test_names_that_lead_nowhere(name: str) -> None:
    with pytest.raises(RegionError):
        kvtier.Region.attach(name)


def test_descriptors_come_back() -> None:
    descriptors = Path("/proc/self/fd")
    gc.collect()
    before = len(list(descriptors.iterdir()))
    for _ in range(20):
        region = kvtier.Region(1, 4096)
        kvtier.Region.attach(region.name or "")
    del region
    assert len(list(descriptors.iterdir())) == before
