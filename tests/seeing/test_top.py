"""`kvtier top`: what it makes of readings, and the command on pipes and terminals."""

from __future__ import annotations

import copy
import json
import os
import pty
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.cli import main
from kvtier.cli.top_figures import History, ManagerRecord, TierRecord, quantile
from kvtier.pages import StatsPage, read_pages

from .conftest import Process, make_manager, store

Start = Callable[[], Process]
TOP = [sys.executable, "-m", "kvtier", "top"]


@pytest.fixture
def page(directory: Path) -> StatsPage:  # noqa: ARG001 (sets the environment)
    manager = make_manager()
    store(manager, 1)
    (page,) = read_pages().pages
    manager.shutdown()
    return page


def later(page: StatsPage, **primary: int) -> StatsPage:
    page = copy.deepcopy(page)
    for name, more in primary.items():
        page["stats"]["primary"][name] += more  # type: ignore[literal-required]
    return page


def primary(records: list[ManagerRecord]) -> TierRecord:
    (record,) = records
    return record["tiers"][0]


def test_rates_are_differences_over_the_time_between(page: StatsPage) -> None:
    history = History()
    (first,) = history.add([page], 1000.0)
    assert first["steps_per_s"] is None
    assert first["tiers"][0]["store_bytes_per_s"] is None
    page = later(page, steps=20, stored_chunks=8, loaded_chunks=4)
    (second,) = history.add([page], 1002.0)
    assert second["steps_per_s"] == 10
    assert second["tiers"][0]["store_bytes_per_s"] == 4 * 4096
    assert second["tiers"][0]["load_bytes_per_s"] == 2 * 4096
    (idle,) = history.add([page], 1012.0)
    assert idle["steps_per_s"] == 0


def test_hit_rates_by_window(page: StatsPage) -> None:
    history = History()
    history.add([page], 1000.0)
    history.add([later(page, hits=10)], 1030.0)
    shown = primary(history.add([later(page, hits=13, misses=1)], 1040.0))
    assert shown["hit_rate"] == {"10s": 3 / 4, "60s": 13 / 14, "start": 13 / 14}
    shown = primary(history.add([later(page, hits=13, misses=1)], 1098.0))
    assert shown["hit_rate"] == {"10s": None, "60s": None, "start": 13 / 14}


def test_a_single_reading_tells_of_the_start_only(page: StatsPage) -> None:
    shown = primary(History().add([later(page, hits=1, misses=1)], 1000.0))
    assert shown["hit_rate"] == {"10s": None, "60s": None, "start": 0.5}


def test_old_readings_are_forgotten_and_so_are_managers(page: StatsPage) -> None:
    history = History()
    for second in range(300):
        history.add([later(page, steps=second)], 1000.0 + second)
    (readings,) = history._readings.values()
    assert 60 <= len(readings) <= 70
    assert history.add([], 1300.0) == []
    assert not history._readings
    (again,) = history.add([page], 1301.0)
    assert again["steps_per_s"] is None


def test_a_process_that_took_the_number_of_another_starts_anew(page: StatsPage) -> None:
    history = History()
    history.add([later(page, steps=1000)], 1000.0)
    other = copy.deepcopy(page)
    other["opened"] += 1
    (record,) = history.add([other], 1001.0)
    assert record["steps_per_s"] is None


def test_reasons_for_misses_are_ranked_by_the_last_minute(page: StatsPage) -> None:
    before, after = copy.deepcopy(page), copy.deepcopy(page)
    before["stats"]["tiers"]["memory"]["sheds"] = 100
    tier = after["stats"]["tiers"]["memory"]
    tier["sheds"], tier["evictions"] = 101, 5
    tier["load_failures"]["corrupt"] = 7
    after["stats"]["primary"]["evictions"] = 50  # they are still in the memory tier
    history = History()
    history.add([before], 1000.0)
    (record,) = history.add([after], 1010.0)
    assert [tuple(miss.values()) for miss in record["misses"]] == [
        ("memory", "load failed: corrupt", 7, 7),
        ("memory", "evicted", 5, 5),
        ("memory", "shed: too slow", 1, 101),
    ]


def test_a_version_that_lacks_a_figure_is_shown_without_it(page: StatsPage) -> None:
    del page["stats"]["primary"]["steps"]  # type: ignore[misc]
    history = History()
    history.add([page], 1000.0)
    (record,) = history.add([page], 1001.0)
    assert record["steps_per_s"] == 0
    assert history.refused == []


def test_a_version_that_lacks_what_must_be_shown_is_named_and_hides_no_other(
    page: StatsPage,
) -> None:
    other = copy.deepcopy(page)
    other["path"], other["version"] = "/dev/shm/other", "9.9"
    del other["stats"]["tiers"]["memory"]["capacity_bytes"]  # type: ignore[misc]
    history = History()
    (record,) = history.add([other, page], 1000.0)
    assert record["version"] == page["version"]
    (why,) = history.refused
    assert why.startswith("/dev/shm/other: its kvtier 9.9 does not count 'capacity_bytes'")


@given(
    st.lists(st.integers(0, 100), min_size=4, max_size=4).filter(any),
    st.floats(0.01, 1),
)
def test_a_quantile_has_its_share_at_or_below_it(counts: list[int], share: float) -> None:
    bounds = [1.0, 2.0, 4.0]
    found = quantile(counts, bounds, share)
    assert found is not None
    assert 0 <= found <= 4
    sure = sum(count for count, high in zip(counts, bounds, strict=False) if high <= found)
    assert sure <= share * sum(counts) + 1e-6 or found == 4
    at_most = sum(count for count, low in zip(counts, [0.0, *bounds], strict=True) if low <= found)
    assert at_most >= share * sum(counts) - 1e-6


def test_a_quantile_of_nothing_is_unknown() -> None:
    assert quantile([0, 0], [1.0], 0.5) is None
    assert quantile([0, 3], [1.0], 0.5) == 1.0, "all we know is that it took longer"


def test_json_once_is_one_object(start: Start, capsys: pytest.CaptureFixture[str]) -> None:
    process, other = start(), start()
    process.do("keys = [bytes(8)]; manager.prepare_store(1, keys); manager.complete_store(1, keys)")
    process.do("manager.drain(60)")
    assert main(["top", "--once", "--json", "--interval", "0.01", str(process.popen.pid)]) == 0
    out, complaint = capsys.readouterr()
    assert complaint == ""
    assert out.count("\n") == 1
    shown = json.loads(out)
    (manager,) = shown["managers"]
    assert (manager["pid"], manager["manager"]) == (process.popen.pid, 0)
    assert manager["command"].startswith(sys.executable)
    assert [tier["name"] for tier in manager["tiers"]] == ["primary", "behind"]
    assert [tier["chunks"] for tier in manager["tiers"]] == [1, 1]
    assert manager["tiers"][1]["breakers"] == {"load": "closed", "store": "closed"}
    assert shown["refused"] == []
    assert other.popen.pid != process.popen.pid


def test_a_pipe_gets_a_screen_a_reading_while_processes_come_and_go(start: Start) -> None:
    first = start()
    with subprocess.Popen([*TOP, "--interval", "0.05"], stdout=subprocess.PIPE, text=True) as top:
        assert top.stdout is not None

        def until(wanted: Callable[[str], bool]) -> None:
            assert top.stdout is not None
            while not wanted(line := top.stdout.readline()):
                assert line, "ended"

        until(lambda line: line.startswith(str(first.popen.pid)))
        second = start()
        until(lambda line: line.startswith(str(second.popen.pid)))
        first.kill()
        second.kill()
        until(lambda line: line.startswith("no manager shows its figures"))
        third = start()
        until(lambda line: line.startswith(str(third.popen.pid)))
        until(lambda line: "behind" in line and "closed/closed" in line)
        top.send_signal(signal.SIGINT)
        top.communicate(timeout=30)
        assert top.returncode == 0


def test_a_terminal_shows_it_live_and_is_restored(start: Start) -> None:
    process = start()
    ours, theirs = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "150", "LINES": "40"}
    with subprocess.Popen(
        [*TOP, "--interval", "0.05"], stdout=theirs, stderr=theirs, env=environment
    ) as top:
        os.close(theirs)
        shown = b""
        while b"closed/closed" not in shown:
            shown += os.read(ours, 4096)
        top.send_signal(signal.SIGINT)
        try:
            while part := os.read(ours, 4096):
                shown += part
        except OSError:  # Linux says EIO when the other end is closed
            pass
        assert top.wait(30) == 0
    os.close(ours)
    assert str(process.popen.pid).encode() in shown
    assert b"\x1b[?1049h" in shown, "on a screen of its own"
    assert shown.rstrip().endswith(b"\x1b[?25h\x1b[?1049l"), "cursor and screen are back"


def test_a_reader_of_the_pipe_that_leaves_ends_it(start: Start) -> None:
    start()
    with subprocess.Popen([*TOP, "--interval", "0.01", "--json"], stdout=subprocess.PIPE) as top:
        assert top.stdout is not None
        assert json.loads(top.stdout.readline())["managers"]
        top.stdout.close()
        assert top.wait(30) == 2


def test_pages_that_can_not_be_read_are_shown(
    start: Start, capsys: pytest.CaptureFixture[str]
) -> None:
    start()
    (page,) = read_pages().pages
    with Path(page["path"]).open("r+b") as file:
        file.seek(8)
        file.write(b"\x07")
    assert main(["top", "--once", "--interval", "0.01"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "has layout 7, this version of kvtier reads 1" in out


@pytest.mark.parametrize("interval", ["0", "-1", "nan", "inf", "soon"])
def test_an_interval_that_is_none_is_refused(
    interval: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["top", "--interval", interval]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_without_pages_it_says_how_to_have_them(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("KVTIER_STATS_DIR", "")
    assert main(["top", "--once"]) == 2
    assert "KVTIER_STATS_DIR is empty" in capsys.readouterr().err
