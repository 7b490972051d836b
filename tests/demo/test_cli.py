"""The parts of the command line that need no second process."""

import argparse
import signal
import threading
from collections.abc import Callable

import pytest

from kvtier.cli import main
from kvtier.cli.interrupts import heavy_import, interruptible
from kvtier.cli.sizes import format_size, parse_size
from kvtier.demo import recompute

SMALL = (
    *("demo", "--sessions", "2", "--turns", "2", "--new-tokens", "2", "--context", "128"),
    *("--block-size", "4", "--blocks-per-chunk", "4", "--layers", "1", "--d-model", "32"),
    *("--heads", "2", "--kv-heads", "1", "--threads", "1"),
)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("1", 1),
        ("512b", 512),
        ("64MiB", 64 << 20),
        ("1GB", 10**9),
        ("1.5 kib", 1536),
        ("2k", 2048),
        ("3T", 3 << 40),
    ],
)
def test_sizes_are_read(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "MiB", "-1MiB", "1XB", "1 2", "0", "0.1b", "nan"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError):
        parse_size(text)


@pytest.mark.parametrize(
    ("size", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (51 << 20, "51.0 MiB"), (2 << 40, "2.0 TiB")],
)
def test_sizes_are_shown(size: int, text: str) -> None:
    assert format_size(size) == text


def test_a_difference_is_exit_code_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(recompute, "first_byte_difference", lambda *_: "layer layers.0, byte 9")
    assert main([*SMALL]) == 1
    out, complaint = capsys.readouterr()
    assert "DIFFERENT: 3 of 3 recomputed turns" in out
    assert complaint.splitlines() == [
        f"kvtier demo: difference: session {session}, turn {turn}: layer layers.0, byte 9"
        for session, turn in ((1, 0), (0, 1), (1, 1))
    ]


def interrupted_in_clean_up(number: signal.Signals) -> None:
    with interruptible():
        assert heavy_import("json").__name__ == "json"
        try:
            signal.raise_signal(number)
        finally:
            signal.raise_signal(signal.SIGINT)


def test_signals_raise_once_and_handlers_come_back() -> None:
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    for number in (signal.SIGINT, signal.SIGTERM):
        with pytest.raises(KeyboardInterrupt):
            interrupted_in_clean_up(number)
        assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before


def test_other_threads_leave_the_handlers_alone() -> None:
    seen: list[bool] = []

    def work() -> None:
        before = signal.getsignal(signal.SIGINT)
        with interruptible():
            seen.append(signal.getsignal(signal.SIGINT) is before)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [True]


def test_a_terminal_gets_a_progress_bar(on_terminal: Callable[..., tuple[str, bytes]]) -> None:
    out, shown = on_terminal(*SMALL, "--json", columns=80)
    assert b"4/4" in shown
    assert out.count("\n") == 1
