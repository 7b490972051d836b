"""Stats pages: what other processes see of a manager, and what becomes of pages nobody writes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import kvtier
from kvtier import errors
from kvtier.pages import read_pages

from .conftest import Process, key, make_manager, store

Start = Callable[[], Process]


def test_a_page_says_what_stats_says(directory: Path) -> None:
    manager = make_manager()
    store(manager, 1, 2)
    manager.lookup(1, [key(1), key(9)])
    manager.end_step()
    (page,) = read_pages().pages
    assert page["stats"] == manager.stats()
    assert page["stats"]["tiers"]["memory"]["stores"] == 2
    assert page["pid"] == os.getpid()
    assert page["slot_bytes"] == 4096
    assert (*page["latency_buckets"], float("inf")) == kvtier.LATENCY_BUCKETS
    assert page["opened"] <= page["published"]
    manager.shutdown()
    assert list(directory.iterdir()) == []


def test_several_processes_and_managers(start: Start) -> None:
    first, second = start(), start()
    second.do("another = kvtier.Manager(kvtier.Region(4, 4096)); another.end_step()")
    found = [(page["pid"], page["manager"]) for page in read_pages().pages]
    assert sorted(found) == sorted(
        [(first.popen.pid, 0), (second.popen.pid, 0), (second.popen.pid, 1)]
    )
    second.do("another.shutdown()")
    assert len(read_pages().pages) == 2


def test_a_page_of_a_killed_process_is_removed(start: Start, directory: Path) -> None:
    lives, dies = start(), start()
    dies.kill()
    assert len(list(directory.iterdir())) == 2
    assert [page["pid"] for page in read_pages().pages] == [lives.popen.pid]
    assert len(list(directory.iterdir())) == 1


def test_a_manager_removes_pages_of_killed_processes(start: Start, directory: Path) -> None:
    start().kill()
    assert len(list(directory.iterdir())) == 1
    manager = make_manager()
    assert len(list(directory.iterdir())) == 1
    manager.shutdown()
    assert list(directory.iterdir()) == []


def test_a_forked_child_keeps_no_page_alive(start: Start, directory: Path, tmp_path: Path) -> None:
    parent = start()
    child = tmp_path / "pid"
    parent.do(
        "import os, pathlib, signal; child = os.fork() or signal.pause(); "
        f"pathlib.Path({str(child)!r}).write_text(str(child))"
    )
    try:
        (page,) = read_pages().pages
        assert page["pid"] == parent.popen.pid
        parent.kill()
        # The child still has every file of its parent, and with them the page's lock.
        assert read_pages().pages == []
        assert list(directory.iterdir()) == []
    finally:
        os.kill(int(child.read_text()), signal.SIGKILL)


def test_the_child_of_a_fork_leaves_the_page_when_it_ends(directory: Path) -> None:
    code = """
import os, warnings
warnings.simplefilter("ignore")
import kvtier
from kvtier.pages import read_pages
manager = kvtier.Manager(kvtier.Region(4, 4096))
pid = os.fork()
if pid == 0:
    del manager
    raise SystemExit
assert os.waitpid(pid, 0)[1] == 0
manager.end_step()
assert len(read_pages().pages) == 1
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
    assert list(directory.iterdir()) == []


def test_pages_are_turned_off_by_an_empty_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVTIER_STATS_DIR", "")
    manager = make_manager()
    manager.end_step()
    with pytest.raises(errors.StatsPageError, match="KVTIER_STATS_DIR is empty"):
        read_pages()
    manager.shutdown()


@pytest.mark.parametrize("directory", ["/proc", "/dev/shm/kvtier is not here"])
def test_without_a_page_a_manager_warns_and_works(
    directory: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVTIER_STATS_DIR", directory)
    code = "import kvtier; kvtier.Manager(kvtier.Region(4, 4096)).end_step(); print('worked')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout == "worked\n"
    assert "kvtier top and kvtier exporter will not show this manager" in done.stderr
    assert directory in done.stderr


def test_pages_that_can_not_be_read_are_named_and_hide_no_other(
    start: Start,
) -> None:
    good, cut, other = start(), start(), start()
    pages = {page["pid"]: Path(page["path"]) for page in read_pages().pages}
    with pages[cut.popen.pid].open("r+b") as file:
        file.truncate(100)
    with pages[other.popen.pid].open("r+b") as file:
        file.seek(8)
        file.write(b"\x07")
    found = read_pages()
    assert [page["pid"] for page in found.pages] == [good.popen.pid]
    assert len(found.refused) == 2
    assert any("layout 7, this version of kvtier reads 1" in why for why in found.refused)
    # Their processes go on.
    for process in (cut, other):
        process.do("manager.end_step()")


def test_figures_of_another_version_are_read_by_name(start: Start) -> None:
    """What makes a page self-describing: the words are named in it, not in the reader."""
    start()
    (page,) = read_pages().pages
    raw = Path(page["path"]).read_bytes()
    length = int.from_bytes(raw[16:24], "little")
    description = json.loads(raw[40 : 40 + length])
    assert [field["name"] for field in description["primary"]] == list(page["stats"]["primary"])
    tier = page["stats"]["tiers"]["behind"]
    (described,) = description["tiers"]
    assert [field["name"] for field in described["figures"]] == [
        name for name in tier if name not in ("medium", "locality")
    ]


def test_a_stopped_process_is_still_there(start: Start) -> None:
    process = start()
    os.kill(process.popen.pid, signal.SIGSTOP)
    assert len(read_pages().pages) == 1
    os.kill(process.popen.pid, signal.SIGCONT)
