"""How `kvtier demo` shows its progress and its result to people."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from kvtier.cli.progress import progress_bar
from kvtier.cli.sizes import format_size
from kvtier.demo.options import DemoOptions
from kvtier.demo.records import LONG_CONTEXT_TOKENS, CopyTotals, DemoReport, TurnRecord

__all__ = ["print_report", "progress"]

_PIPE_WIDTH = 110


@contextlib.contextmanager
def progress(options: DemoOptions) -> Iterator[Callable[[TurnRecord], None]]:
    """Yields what is to be called after every turn, for the progress bar."""
    with progress_bar(options.sessions * options.turns, "turns") as advance:

        def on_turn_end(record: TurnRecord) -> None:
            advance(f"turn {record.turn} of session {record.session} done", 1)

        yield on_turn_end


def print_report(report: DemoReport) -> None:
    """Prints the tables to standard output."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=_PIPE_WIDTH)
    if report.warm_start:
        console.print(
            f"warm start: {report.warm_chunks} chunks found in {report.directory}",
            soft_wrap=True,
            markup=False,
        )
    _print_setting(console, report.setting)
    tiers = report.stats["tiers"]
    console.print(_turn_table(report, list(tiers)))
    console.print(_movement_table(report, tiers))
    console.print(_hit_table(report, tiers))
    for line in _verdict(report):
        console.print(line, soft_wrap=True, markup=False)


def _print_setting(console: Console, setting: dict[str, Any]) -> None:
    console.print(
        f"{setting['sessions']} sessions of {setting['turns']} turns about "
        f"{', '.join(setting['sources'])}\n"
        f"decoder: {setting['layers']} layers, width {setting['d_model']}, "
        f"{format_size(setting['kv_bytes_per_token'])} of KV cache a token, "
        f"{setting['device']}, {setting['threads']} threads\n"
        f"GPU pool {format_size(setting['gpu_bytes'])}, "
        f"host {format_size(setting['host_bytes'])}, disk {format_size(setting['disk_bytes'])}, "
        f"chunks of {setting['chunk_tokens']} tokens and {format_size(setting['chunk_bytes'])}",
        soft_wrap=True,
        markup=False,
    )


def _table(*columns: str) -> Table:
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for number, column in enumerate(columns):
        table.add_column(column, justify="left" if number == 0 else "right", no_wrap=True)
    return table


def _turn_table(report: DemoReport, tiers: list[str]) -> Table:
    table = _table(
        "session.turn", "context", "gpu", "host", *tiers, "computed",
        "restored ms", "recomputed ms", "ratio", "same",
    )  # fmt: skip
    for turn in report.turns:
        counts = [turn.reused[source] for source in ("gpu", "primary", *tiers)]
        again = turn.ttft_recomputed_s
        same = "-"
        if again is not None:
            same = "yes" if turn.difference is None else "NO"
        table.add_row(
            f"{turn.session}.{turn.turn}",
            *(str(count) for count in (turn.context_tokens, *counts)),
            str(turn.context_tokens - sum(counts)),
            f"{turn.ttft_restored_s * 1e3:.0f}",
            "-" if again is None else f"{again * 1e3:.0f}",
            "-" if turn.ratio is None else f"{turn.ratio:.1f}",
            same,
        )
    return table


def _movement_table(report: DemoReport, tiers: dict[str, Any]) -> Table:
    table = _table("moved", "bytes", "seconds", "GB/s")
    moves = [("gpu -> host", report.stored), ("host -> gpu", report.loaded)]
    for name, tier in tiers.items():
        stores = CopyTotals(tier["store_bytes"], tier["store_seconds"])
        loads = CopyTotals(tier["load_bytes"], tier["load_seconds"])
        moves += [(f"host -> {name}", stores), (f"{name} -> host", loads)]
    for label, total in moves:
        rate = f"{total.bytes / total.seconds / 1e9:.2f}" if total.seconds else "-"
        table.add_row(label, format_size(total.bytes), f"{total.seconds:.3f}", rate)
    return table


def _hit_table(report: DemoReport, tiers: dict[str, Any]) -> Table:
    """Hit rates are shares of all tokens that could have been reused."""
    table = _table("tier", "tokens reused", "hit rate", "evictions", "corrupt", "failed loads")
    step = report.chunk_tokens
    total = sum((turn.context_tokens - 1) // step * step for turn in report.turns)
    rows: list[tuple[str, str, int, str, str]] = [
        ("gpu", "gpu", report.gpu["evictions"], "-", "-"),
        ("host", "primary", report.stats["primary"]["evictions"], "-", "-"),
    ]
    rows += [
        (
            name,
            name,
            tier["evictions"],
            str(tier["load_failures"]["corrupt"]),
            str(sum(tier["load_failures"].values())),
        )
        for name, tier in tiers.items()
    ]
    for label, source, evictions, corrupt, failed in rows:
        tokens = report.reused(source)
        rate = f"{tokens / total:.1%}" if total else "-"
        table.add_row(label, str(tokens), rate, str(evictions), corrupt, failed)
    return table


def _verdict(report: DemoReport) -> list[str]:
    judged = [turn for turn in report.turns if turn.ttft_recomputed_s is not None]
    lines = [f"{len(report.turns)} turns in {report.seconds:.1f} s"]
    if report.ratio_median is not None:
        lines.append(
            f"time to first token, recomputed over restored: median {report.ratio_median:.1f} "
            f"(returning turns of {LONG_CONTEXT_TOKENS} tokens and more)"
        )
    if report.differences:
        lines.append(f"DIFFERENT: {len(report.differences)} of {len(judged)} recomputed turns")
    else:
        lines.append(
            f"all {len(judged)} recomputed turns gave the same tokens and the same KV bytes"
        )
    skipped = sum(turn.chunks_not_stored for turn in report.turns)
    if skipped:
        lines.append(f"{skipped} chunks were not stored: host memory had no room in time")
    return lines
