"""`KVTIER_TRACE`: what manager and transfers tell it, from one process and from several."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import kvtier
from kvtier._kvtier import TraceFile
from kvtier.torch import FullAttentionSpec, TransferEngine, allocate_kv_cache

from .conftest import Process, key, make_manager, store


@pytest.fixture
def trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "trace.json"
    monkeypatch.setenv("KVTIER_TRACE", str(path))
    return path


def events(path: Path) -> list[dict[str, Any]]:
    """The array, whose end is open."""
    found: list[dict[str, Any]] = json.loads(path.read_text().rstrip().removesuffix(",") + "]")
    return found


def test_steps_and_jobs_are_the_counters(trace: Path, tmp_path: Path) -> None:
    disk = {"type": "file", "name": "disk", "path": str(tmp_path / "store")}
    manager = make_manager([{**disk, "capacity_bytes": 1 << 20}], slots=4)
    for number in range(12):
        store(manager, number)
    assert manager.lookup(2, [key(0), key(1)]).tolist() == [kvtier.HIT_PENDING] * 2
    assert manager.drain(60)
    stats = manager.stats()
    manager.shutdown()
    found = events(trace)
    assert {event["pid"] for event in found} == {os.getpid()}
    steps = [event for event in found if event["name"] == "step"]
    assert len(steps) == stats["primary"]["steps"]
    tier = stats["tiers"]["disk"]
    for direction in ("load", "store"):
        jobs = [event for event in found if event["name"] == f"disk {direction}"]
        begun = {event["id"]: event for event in jobs if event["ph"] == "b"}
        ended = {event["id"]: event for event in jobs if event["ph"] == "e"}
        assert begun.keys() == ended.keys()
        assert len(ended) == sum(tier[f"{direction}_latency"]["counts"]) > 0
        assert sum(end["args"]["bytes"] for end in ended.values()) == tier[f"{direction}_bytes"]
        assert sum(end["args"]["moved"] for end in ended.values()) == tier[f"{direction}s"]
        chunks = sum(begin["args"]["chunks"] for begin in begun.values())
        assert chunks == tier[f"{direction}s"] + sum(tier[f"{direction}_failures"].values())
        assert all(begun[job]["ts"] <= ended[job]["ts"] for job in begun)


def test_transfers_have_a_track_a_lane_and_do_not_overlap_there(trace: Path) -> None:
    spec = FullAttentionSpec(block_size=4, num_kv_heads=2, head_dim=8, dtype=torch.float32)
    cache = allocate_kv_cache({"layer": spec}, num_blocks=16, device="cpu")
    region = kvtier.Region(slots=4, slot_bytes=2 * cache.page_bytes)
    with TransferEngine(region, cache, blocks_per_chunk=2) as engine:
        jobs = []
        for turn in range(3):
            blocks = np.arange(8).reshape(4, 2)
            jobs += [
                engine.store(blocks, np.arange(4)),
                engine.load(blocks + 8, np.arange(4), expedited=turn == 1),
            ]
        for job in jobs:
            engine.wait(job)
    found = events(trace)
    tracks = {event["tid"]: event["args"]["name"] for event in found if event["ph"] == "M"}
    assert sorted(tracks.values()) == [
        "transfers: expedited", "transfers: load", "transfers: store",
    ]  # fmt: skip
    spans = [event for event in found if event["ph"] == "X"]
    assert sorted(span["args"]["job"] for span in spans) == [job.number for job in jobs]
    by_number = {job.number: job for job in jobs}
    for span in spans:
        job = by_number[span["args"]["job"]]
        assert tracks[span["tid"]] == f"transfers: {span['name']}"
        assert span["args"]["bytes"] == job.bytes
        assert span["ts"] == pytest.approx(job.began * 1e6, abs=1)
        assert span["dur"] == pytest.approx(job.seconds * 1e6, abs=1)
    for track in tracks:
        lane = sorted((span["ts"], span["dur"]) for span in spans if span["tid"] == track)
        for (began, took), (next_began, _) in itertools.pairwise(lane):
            assert began + took <= next_began + 0.01


def test_two_managers_of_a_process_have_jobs_of_their_own(trace: Path) -> None:
    managers = [make_manager(), make_manager()]
    for manager in managers:
        store(manager, 1, 2)
    for manager in managers:
        manager.shutdown()
    begun = [event["id"] for event in events(trace) if event["ph"] == "b"]
    assert len(begun) == len(set(begun)) == 2


def test_a_trace_of_killed_processes_loads(trace: Path, start: Callable[[], Process]) -> None:
    processes = [start(), start()]
    for process in processes:
        process.do("[manager.end_step() for _ in range(20)]")
        process.kill()
    found = events(trace)
    for process in processes:
        steps = [event for event in found if event["pid"] == process.popen.pid]
        assert sum(event["name"] == "step" for event in steps) == 21


def test_the_child_of_a_fork_writes_nothing(trace: Path) -> None:
    code = """
import os, warnings
warnings.simplefilter("ignore")
import kvtier
from kvtier._kvtier import TraceFile
manager, file = kvtier.Manager(kvtier.Region(4, 4096)), TraceFile.open()
file.span(1, "parent's", 1.0, 1.0, job=1, bytes=1)
if (pid := os.fork()) == 0:
    file.span(1, "child's", 1.0, 1.0, job=1, bytes=1)
    file.flush()
    del manager, file
    raise SystemExit
assert os.waitpid(pid, 0)[1] == 0
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
    assert [event["name"] for event in events(trace)] == ["parent's"]


def test_without_the_variable_there_is_no_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    for value in ("", None):
        if value is None:
            monkeypatch.delenv("KVTIER_TRACE", raising=False)
        else:
            monkeypatch.setenv("KVTIER_TRACE", value)
        assert TraceFile.open() is None


@pytest.mark.parametrize("content", [None, "notes of mine"])
def test_a_file_that_can_not_be_had_is_a_warning(tmp_path: Path, content: str | None) -> None:
    path = tmp_path / "missing" / "trace.json" if content is None else tmp_path / "notes.txt"
    if content is not None:
        path.write_text(content)
    code = "import kvtier; kvtier.Manager(kvtier.Region(4, 4096)).end_step(); print('worked')"
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "KVTIER_TRACE": str(path)},
    )
    assert done.stdout == "worked\n"
    assert "no trace is written" in done.stderr
    assert str(path) in done.stderr
    assert content is None or path.read_text() == content


def test_times_that_are_none_are_refused(trace: Path) -> None:
    file = TraceFile.open()
    assert file is not None
    for began, seconds in ((-1.0, 0.0), (0.0, float("nan")), (0.0, float("inf"))):
        with pytest.raises(ValueError, match="are no time"):
            file.span(1, "wrong", began, seconds, job=1, bytes=1)
    file.flush()
    assert trace.read_text() == "[\n"
