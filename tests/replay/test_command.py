"""`kvtier replay`: what it prints and writes, and what it refuses."""

from __future__ import annotations

import contextlib
import csv
import io
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvtier.cli import main
from kvtier.cli.replay import _capacity
from kvtier.replay import OPTIMUM, POLICIES, Trace

from .conftest import Write

FIELDS = {
    "trace": str,
    "policy": str,
    "capacity": int,
    "requests": int,
    "blocks": int,
    "block_hits": float,
    "prefix_hits": float,
    "optimum_hits": float,
    "seconds": float,
}


@pytest.fixture
def trace(write: Write, chats: list[list[int]]) -> Path:
    return write(chats, "chats.jsonl")


def printed_json(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    out, complaint = capsys.readouterr()
    assert complaint == ""
    assert out.count("\n") == 1
    found: dict[str, Any] = json.loads(out)
    return found


def test_json_is_one_object(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", str(trace), "--capacity", "280,50,280", "--json"]) == 0
    shown = printed_json(capsys)
    assert list(shown) == ["results"]
    results = shown["results"]
    expected = [(policy, capacity) for policy in POLICIES for capacity in (50, 280)]
    assert [(result["policy"], result["capacity"]) for result in results] == expected
    for result in results:
        assert {name: type(value) for name, value in result.items()} == FIELDS
        counts = Trace.read(trace).replay(result["policy"], result["capacity"])
        assert result["trace"] == "chats"
        assert (result["requests"], result["blocks"]) == (100, 900)
        assert result["prefix_hits"] == counts["prefix_hits"] / 900
        assert 0 <= result["block_hits"] <= result["optimum_hits"] < 1


def test_json_says_what_a_target_takes(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--policy", "lru", "--target", "0.3", "--block-tokens", "16", "--block-bytes", "2MiB"]
    assert main(["replay", str(trace), "--json", *flags]) == 0
    lru, optimum = printed_json(capsys)["targets"]
    assert (lru["policy"], optimum["policy"]) == ("lru", OPTIMUM)
    assert lru["reachable"] is True
    assert lru["hits"] >= lru["target"] == 0.3
    assert lru["tokens"] == 16 * lru["capacity"]
    assert lru["bytes"] == (2 << 20) * lru["capacity"]
    assert 1 <= optimum["capacity"] <= lru["capacity"]


def test_a_target_out_of_reach_is_exit_code_1(
    trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["replay", str(trace), "--target", "0.9", "--json"]) == 1
    for target in printed_json(capsys)["targets"]:
        assert target["reachable"] is False
        assert target["capacity"] is target["tokens"] is target["bytes"] is None
        assert target["unlimited_hits"] == 600 / 900
    assert main(["replay", str(trace), "--target", "0.9", "--policy", "lru"]) == 1
    text = capsys.readouterr().out
    assert "lru can not reach 90.00%: even unlimited memory has 66.67% prefix hits" in text


def test_tables_show_every_policy_and_the_ceiling(
    trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    many = ",".join(str(size) for size in range(10, 310, 10))
    flags = ["--capacity", many, "--target", "0.3", "--block-bytes", "1GiB"]
    assert main(["replay", str(trace), *flags]) == 0
    out, complaint = capsys.readouterr()
    assert complaint == ""
    assert "chats: 100 requests, 900 block accesses, 300 different blocks" in out
    words = out.split()
    assert words.count("block") >= 30 // 7  # one table is not wide enough
    assert set(POLICIES) | {"optimum", "tokens", "memory", "10", "300", "66.67%", "153.6k"} <= {
        *words
    }
    assert "GiB" in words
    assert "…" not in out


def test_csv_goes_to_a_file_or_to_standard_output(
    trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["replay", str(trace), "--capacity", "50,1k", "--block-bytes", "4KiB"]
    assert main([*flags, "--csv", "-"]) == 0
    out = capsys.readouterr().out
    rows = list(csv.DictReader(io.StringIO(out)))
    assert list(rows[0]) == [*FIELDS, "capacity_tokens", "capacity_bytes"]
    assert len(rows) == 2 * len(POLICIES)
    assert rows[1]["capacity"] == "1000"
    assert rows[1]["capacity_tokens"] == "512000"
    assert rows[1]["capacity_bytes"] == "4096000"
    assert float(rows[1]["prefix_hits"]) == 600 / 900
    file = tmp_path / "out.csv"
    assert main([*flags, "--csv", str(file), "--json"]) == 0
    results = printed_json(capsys)["results"]
    with file.open(newline="") as lines:
        written = list(csv.DictReader(lines))
    assert [row["prefix_hits"] for row in written] == [
        str(result["prefix_hits"]) for result in results
    ]


def test_the_plot_is_a_picture(
    trace: Path, write: Write, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    other = write([[1], [1]], "other.jsonl")
    picture = tmp_path / "curve.png"
    flags = ["--capacity", "10,100,1k", "--block-bytes", "1MiB", "--json"]
    assert main(["replay", str(trace), str(other), "--plot", str(picture), *flags]) == 0
    assert {result["trace"] for result in printed_json(capsys)["results"]} == {"chats", "other"}
    assert picture.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    drawing = tmp_path / "curve.svg"
    assert main(["replay", str(trace), "--plot", str(drawing), "--capacity", "7"]) == 0
    assert "<svg" in drawing.read_text()


def test_traces_of_one_name_are_told_apart(
    write: Write, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = [write([[1], [1]], f"{where}/trace.jsonl") for where in ("a", "b")]
    flags = ["--policy", "lru", "--capacity", "1", "--json"]
    assert main(["replay", *map(str, paths), str(paths[0]), *flags]) == 0
    assert [result["trace"] for result in printed_json(capsys)["results"]] == [*map(str, paths)]


@pytest.mark.parametrize(
    ("text", "blocks"),
    [
        ("1", 1), ("5000", 5000), ("1k", 1000), ("5K", 5000), ("2.5M", 2_500_000), ("1g", 10**9),
        ("64GiB", 1 << 10), ("64mib", 1), ("100MB", 1),
    ],
)  # fmt: skip
def test_capacities_are_read(text: str, blocks: int) -> None:
    assert _capacity(text, 64 << 20) == blocks


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (["--capacity", "0"], "--capacity: 0 is not possible: use 1 to 2147483647 blocks"),
        (["--capacity", "-5"], "--capacity: -5 is not possible"),
        (["--capacity", "3G"], "--capacity: 3G is not possible"),
        (["--capacity", "1e999999"], "--capacity: 1e999999 is not possible"),
        (["--capacity", "5x"], "'5x' is no number of blocks; write 5000, 5k or 2.5M"),
        (["--capacity", "inf"], "'inf' is no number of blocks"),
        (["--capacity", ""], "'' is no number of blocks"),
        (["--capacity", "1.5"], "1.5 is no whole number of blocks"),
        (["--capacity", "64GiB"], "64GiB is a size: give that of a block with --block-bytes"),
        (["--capacity", "1KiB", "--block-bytes", "2KiB"], "1KiB is less than one block of 2048"),
        (["--capacity", "9" * 400 + "GiB", "--block-bytes", "1"], "it must be above 0 and finite"),
        (["--capacity", "1.2.3GiB", "--block-bytes", "2KiB"], "'1.2.3GiB' is not a size"),
        (["--policy", "lru,best"], "--policy: unknown policy 'best': use lru"),
        (["--target", "0"], "--target 0 is no hit rate"),
        (["--target", "nan"], "--target nan is no hit rate"),
        (["--target", "30%"], "invalid float value: '30%'"),
        (["--block-tokens", "0"], "--block-tokens 0: a block has 1 token or more"),
        (["--block-bytes", "many"], "'many' is not a size"),
        (["--json", "--csv", "-"], "--json and --csv - both want standard output"),
        (["--csv", "/no/such/place.csv"], "--csv /no/such/place.csv: the directory does not"),
        (["--csv", "/tmp"], "--csv /tmp is a directory: name a file"),
        (["--plot", "/no/such/place.png"], "--plot /no/such/place.png: the directory does not"),
        (["--colour"], "unknown arguments --colour"),
    ],
)
def test_bad_flags_are_one_line(
    trace: Path, flags: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["replay", str(trace), *flags]) == 2
    out, line = capsys.readouterr()
    assert out == ""
    assert line.startswith("kvtier replay: error: ")
    assert complaint in line
    assert line.count("\n") == 1


def test_a_picture_of_no_format_is_refused(
    trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    assert main(["replay", str(trace), "--plot", str(tmp_path / "curve.doc")]) == 2
    assert ".doc is no picture" in capsys.readouterr().err


def test_without_matplotlib_one_line_says_how_to_get_it(
    trace: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delitem(sys.modules, "kvtier.cli.replay_plot", raising=False)

    class Missing:
        def find_spec(self, name: str, *_: object) -> None:
            if name.partition(".")[0] == "matplotlib":
                raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    monkeypatch.setattr(sys, "meta_path", [Missing(), *sys.meta_path])
    assert main(["replay", str(trace), "--plot", "curve.png"]) == 2
    line = capsys.readouterr().err
    assert line == "kvtier replay: error: --plot needs matplotlib: pip install 'kvtier[plot]'\n"


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (None, "[Errno 2] No such file or directory"),
        ("", "broken: the trace has no requests with blocks"),
        ('{"hash_ids": [1]}\n{"hash_ids": 5}\n', "broken.jsonl: line 2 is no request"),
    ],
)
def test_bad_traces_are_one_line(
    tmp_path: Path, content: str | None, complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "broken.jsonl"
    if content is not None:
        path.write_text(content)
    assert main(["replay", str(path)]) == 2
    out, line = capsys.readouterr()
    assert out == ""
    assert complaint in line
    assert "PosixPath" not in line
    assert line.count("\n") == 1


def test_ctrl_c_ends_the_process_with_130(tmp_path: Path) -> None:
    """The trace never ends: only the signal can end the command."""
    pipe = tmp_path / "endless.jsonl"
    os.mkfifo(pipe)
    process = subprocess.Popen(
        [sys.executable, "-m", "kvtier", "replay", str(pipe)], stderr=subprocess.PIPE, text=True
    )
    lines = b'{"hash_ids": [1, 2, 3]}\n' * 2000
    with process, pipe.open("wb", buffering=0) as feed:  # opens when the command has opened its end
        feed.write(lines)
        process.send_signal(signal.SIGINT)
        with contextlib.suppress(BrokenPipeError):
            while True:
                feed.write(lines)
        _, complaint = process.communicate(timeout=30)
    assert complaint == "kvtier replay: interrupted\n"
    assert process.returncode == 130


def test_a_terminal_gets_a_progress_bar(
    trace: Path, on_terminal: Callable[..., tuple[str, bytes]]
) -> None:
    out, shown = on_terminal("replay", str(trace), "--policy", "lru", "--json", columns=120)
    assert b"6/6" in shown
    assert out.count("\n") == 1


def test_the_conversation_trace(conversation: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--policy", "lru", "--capacity", "1k,5k,10k,30k,50k,100k", "--json"]
    assert main(["replay", str(conversation), *flags]) == 0
    results = printed_json(capsys)["results"]
    assert {(result["requests"], result["blocks"]) for result in results} == {(12031, 288500)}
    prefix = [result["prefix_hits"] for result in results]
    assert prefix == pytest.approx([0.0445, 0.1118, 0.2116, 0.3257, 0.3546, 0.3637], abs=0.005)
    optimum = [result["optimum_hits"] for result in results]
    assert optimum == pytest.approx([0.1907, 0.3412, 0.3664, 0.3664, 0.3664, 0.3664], abs=1e-4)
