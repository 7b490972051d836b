"""`kvtier exporter`: what is exported, under which names, and the server."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from kvtier.cli import main
from kvtier.config import PrimaryStats, TierStats
from kvtier.pages import read_pages
from kvtier.prometheus import PRIMARY, TIER

from .conftest import Process, key, make_manager, store
from .promtool import needs_promtool, promtool

Start = Callable[[], Process]
Sample = tuple[str, frozenset[tuple[str, str]]]


def samples(text: str) -> dict[Sample, float]:
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def printed(capsys: pytest.CaptureFixture[str]) -> str:
    assert main(["exporter", "--once"]) == 0
    out, complaint = capsys.readouterr()
    assert complaint == ""
    return out


def test_every_figure_is_exported() -> None:
    assert {export.figure for export in PRIMARY} == set(PrimaryStats.__annotations__)
    named = {"medium", "locality"}  # labels of kvtier_tier_info
    assert {export.figure for export in TIER} | named == set(TierStats.__annotations__)


@pytest.mark.usefixtures("directory")
def test_samples_are_the_figures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    disk = {"type": "file", "path": str(tmp_path), "capacity_bytes": 1 << 20}
    manager = make_manager([disk])
    store(manager, 1, 2, 3)
    manager.lookup(1, [key(1), key(9)])
    manager.end_step()
    (page,) = read_pages().pages
    found = samples(printed(capsys))
    labels = {"uid": str(os.geteuid()), "pid": str(os.getpid()), "manager": "0"}

    def value(name: str, **more: str) -> float:
        return found[name, frozenset({**labels, **more}.items())]

    tier, figures = {"tier": "file"}, page["stats"]["tiers"]["file"]
    assert value("kvtier_primary_lookups_total", result="hit") == 1
    assert value("kvtier_primary_lookups_total", result="miss") == 1
    assert value("kvtier_slot_bytes") == 4096
    assert value("kvtier_tier_moved_chunks_total", direction="store", **tier) == 3
    assert value("kvtier_tier_moved_bytes_total", direction="store", **tier) == 3 * 4096
    assert value("kvtier_tier_info", medium="file", locality="local", **tier) == 1
    for state, expected in (("closed", 1), ("open", 0), ("half_open", 0)):
        assert value("kvtier_tier_breaker", direction="load", state=state, **tier) == expected
    assert value("kvtier_tier_device_free_bytes", **tier) <= value(
        "kvtier_tier_device_size_bytes", **tier
    )
    # A histogram: cumulative buckets, each with what took its bound at most.
    counts = figures["store_latency"]["counts"]
    job = {"direction": "store", **tier}
    name = "kvtier_tier_job_duration_seconds"
    for at, bound in enumerate(page["latency_buckets"]):
        assert value(f"{name}_bucket", le=repr(bound), **job) == sum(counts[: at + 1])
    assert value(f"{name}_bucket", le="+Inf", **job) == value(f"{name}_count", **job) == 1
    assert value(f"{name}_sum", **job) == figures["store_latency"]["sum"]
    manager.shutdown()


def test_several_processes_share_families(start: Start, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = start(), start()
    text = printed(capsys)
    assert text.count("# TYPE kvtier_steps_total counter") == 1
    pids = {dict(labels)["pid"] for name, labels in samples(text) if name == "kvtier_steps_total"}
    assert pids == {str(first.popen.pid), str(second.popen.pid)}


@needs_promtool
def test_names_and_units_follow_the_conventions(
    start: Start, capsys: pytest.CaptureFixture[str]
) -> None:
    start()
    assert promtool("check", "metrics", stdin=printed(capsys)) == ""


def test_it_serves_what_is_there_now(start: Start) -> None:
    first = start()
    command = [sys.executable, "-m", "kvtier", "exporter", "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as exporter:
        assert exporter.stdout is not None
        url = exporter.stdout.readline().split()[-1]
        assert url.startswith("http://127.0.0.1:")

        def scrape() -> str:
            with urllib.request.urlopen(url, timeout=30) as reply:  # noqa: S310 (ours, http)
                return str(reply.read().decode())

        assert f'pid="{first.popen.pid}"' in scrape()
        # Pages that are cut off, and processes that come and go.
        (page,) = read_pages().pages
        with Path(page["path"]).open("r+b") as file:
            file.truncate(50)
        assert "kvtier_unreadable_pages 1.0" in scrape()
        first.kill()
        second = start()
        text = scrape()
        assert "kvtier_unreadable_pages 0.0" in text
        assert f'pid="{second.popen.pid}"' in text
        assert f'pid="{first.popen.pid}"' not in text
        exporter.send_signal(signal.SIGTERM)
        assert exporter.wait(30) == 0


def test_a_port_that_is_taken_is_refused(start: Start) -> None:
    start()
    command = [sys.executable, "-m", "kvtier", "exporter", "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as exporter:
        assert exporter.stdout is not None
        port = exporter.stdout.readline().rstrip().removesuffix("/metrics").rpartition(":")[2]
        done = subprocess.run([*command[:-1], port], capture_output=True, text=True, timeout=60)
        assert done.returncode == 2
        assert f"can not listen on 127.0.0.1:{port}" in done.stderr
        assert done.stderr.count("\n") == 1
        exporter.terminate()


def test_without_prometheus_client_it_says_what_to_install(
    directory: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert directory.exists()
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    assert main(["exporter", "--once"]) == 2
    assert "pip install 'kvtier[exporter]'" in capsys.readouterr().err


def test_a_version_with_other_figures_is_exported_by_those_we_know(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from prometheus_client import CollectorRegistry, generate_latest

    from kvtier.pages import Pages
    from kvtier.prometheus import Collector

    assert directory.exists()
    manager = make_manager()
    (page,) = read_pages().pages
    manager.shutdown()
    monkeypatch.delitem(page["stats"]["primary"], "steps")
    monkeypatch.setitem(page["stats"]["primary"], "unheard_of", 1)
    registry = CollectorRegistry(auto_describe=False)
    registry.register(Collector(lambda: Pages([page], [])))
    text = generate_latest(registry).decode()
    assert "kvtier_steps" not in text
    assert "kvtier_primary_slots" in text
