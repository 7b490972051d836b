"""`kvtier demo` as users start it: a process, its two streams and its exit code."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

COMMAND = (sys.executable, "-m", "kvtier")
SMALL = (
    *("demo", "--sessions", "2", "--turns", "2", "--new-tokens", "4", "--context", "256"),
    *("--block-size", "4", "--blocks-per-chunk", "4", "--layers", "2", "--d-model", "64"),
    *("--heads", "4", "--kv-heads", "2", "--threads", "1"),
)


def run(*arguments: str | Path, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *map(str, arguments)], capture_output=True, text=True, timeout=60, cwd=cwd
    )


def test_the_json_output_is_one_object(tmp_path: Path) -> None:
    result = run(*SMALL, "--json", "--dir", tmp_path, "--host", "128KiB")
    assert (result.returncode, result.stderr) == (0, "")
    report = json.loads(result.stdout)
    assert report["bytes_equal"] is report["tokens_equal"] is True
    assert report["warm_start"] is False
    assert report["ratio_median"] is None  # no context of 2,000 tokens
    assert set(report["tiers"]) == {"primary", "file"}
    assert len(report["turns"]) == 4
    returning = report["turns"][2]
    assert (returning["session"], returning["turn"]) == (0, 1)
    assert set(returning["reused"]) == {"gpu", "primary", "file"}
    assert returning["reused"]["file"] > 0
    assert returning["tokens_equal"] is returning["bytes_equal"] is True
    assert returning["ttft_recomputed_s"] > 0

    # The tables, from the same directory: a warm start, and it says so.
    result = run(*SMALL, "--dir", tmp_path, "--host", "128KiB")
    assert (result.returncode, result.stderr) == (0, "")
    chunks = report["tiers"]["file"]["chunks"]
    assert result.stdout.startswith(f"warm start: {chunks} chunks found in {tmp_path}\n")
    assert "all 4 recomputed turns gave the same tokens and the same KV bytes" in result.stdout
    assert "\x1b" not in result.stdout  # no colours, no progress bar in a pipe

    # Another identity: refused, and the store is as it was.
    before = sorted(tmp_path.rglob("*"))
    result = run(*SMALL, "--dir", tmp_path, "--seed", "1")
    assert_refused(result, "use another directory: namespace.model.weights_seed is 0, expected 1\n")
    assert sorted(tmp_path.rglob("*")) == before


def assert_refused(result: subprocess.CompletedProcess[str], part: str) -> None:
    assert result.returncode == 2, result.stderr
    assert result.stdout == ""
    assert result.stderr.startswith("kvtier demo: error: ")
    assert result.stderr.count("\n") == 1
    assert "Traceback" not in result.stderr
    assert part in result.stderr


@pytest.mark.parametrize(
    ("flags", "part"),
    [
        (("--sessions", "0"), "--sessions 0: it must be 1 or more"),
        (("--turns", "x"), "argument --turns: invalid int value"),
        (("--colour", "red"), "unknown arguments --colour red; see kvtier demo --help"),
        (("--gpu-pool", "12parsecs"), "argument --gpu-pool: '12parsecs' is not a size"),
        (("--gpu-pool", "1MiB", "--gpu-blocks", "9"), "not allowed with argument"),
        (("--gpu-blocks", "5"), "the GPU pool has 5 blocks, but one session needs"),
        (("--host", "1KiB"), "--host of 1024 bytes is smaller than one chunk"),
        (("--disk", "1KiB"), "--disk of 1024 bytes is smaller than one chunk"),
        (("--disk", "900TiB"), "lower --disk or choose another --dir"),
        (("--host", "900TiB"), "lower --host, --gpu-pool or --sessions"),
        (("--dir", "/dev/null"), "/dev/null is not a directory"),
        (("--dir", "/proc/kvtier"), "/proc"),
        (("--heads", "3"), "--d-model 64 with --heads 3"),
        (("--text", "missing.txt"), "--text missing.txt: No such file"),
        (("--text", "empty.txt"), "--text empty.txt: the file is empty"),
        (("--text", "short.txt"), "--text short.txt: the file has only 3 bytes"),
    ],
)
def test_what_can_not_work_is_said_in_one_line(
    tmp_path: Path, flags: tuple[str, ...], part: str
) -> None:
    (tmp_path / "empty.txt").touch()
    (tmp_path / "short.txt").write_text("abc")
    before = sorted(tmp_path.iterdir())
    where = () if "--dir" in flags else ("--dir", "new/store")
    result = run(*SMALL, *where, *flags, cwd=tmp_path)
    assert_refused(result, part)
    assert sorted(tmp_path.iterdir()) == before


def test_a_gpu_that_is_not_there(tmp_path: Path) -> None:
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    result = subprocess.run(
        [*COMMAND, *SMALL, "--device", "cuda", "--dir", "store"],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=tmp_path,
        env=environment,
    )
    assert_refused(result, "no usable GPU; use --device cpu")
    assert list(tmp_path.iterdir()) == []


def test_version_and_help() -> None:
    version = run("--version")
    assert version.returncode == 0
    assert version.stdout.startswith("kvtier ")
    described = run("demo", "--help")
    assert described.returncode == 0
    assert "--blocks-per-chunk" in described.stdout
    nothing = run()
    assert nothing.returncode == 2
    assert nothing.stderr == "kvtier: error: the following arguments are required: COMMAND\n"


@contextlib.contextmanager
def running_demo(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A demo that is at work, with chunks on disk already, in a process group of its own."""
    store = tmp_path / "store"
    process = subprocess.Popen(
        [*COMMAND, "demo", "--dir", str(store)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    )
    try:
        deadline = time.monotonic() + 60
        while not any(store.glob("segment-*")):
            assert time.monotonic() < deadline
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(0.02)  # the pause between two looks, and a look at the process
            assert process.returncode is None, process.communicate()[1]
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        process.communicate()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_ends_at_once_and_leaves_nothing(
    tmp_path: Path, number: signal.Signals
) -> None:
    shared_before = set(os.listdir("/dev/shm"))  # noqa: PTH208 - names are what is compared
    with running_demo(tmp_path) as process:
        sent = time.monotonic()
        process.send_signal(number)
        out, complaint = process.communicate(timeout=30)
        took = time.monotonic() - sent
    assert process.returncode == 130
    assert (out, complaint) == ("", "kvtier demo: interrupted\n")
    assert took < 1.5  # a second, and some for a busy machine
    with pytest.raises(ProcessLookupError):
        os.killpg(process.pid, 0)  # no process of its group is left
    left = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert [path for path in left if "tmp" in path.name or path.parent == tmp_path] == []
    assert set(os.listdir("/dev/shm")) <= shared_before  # noqa: PTH208
    # What is on disk is whole: the next run takes it.
    assert all(path.stat().st_size > 4096 for path in left if path.suffix == ".kv")
