"""The screen of `kvtier top`."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from kvtier.cli.sizes import format_size
from kvtier.cli.top_figures import ManagerRecord, TierRecord

__all__ = ["screen"]

_COLUMNS = (
    "tier", "used", "of", "hits 10s", "1min", "start", "stored/s", "loaded/s", "jobs", "queued",
    "p50", "p99", "breakers", "sheds",
)  # fmt: skip


def screen(managers: Sequence[ManagerRecord], refused: Sequence[str], where: str) -> RenderableType:
    """Everything that is shown; `where` says where pages were looked for."""
    parts: list[RenderableType] = []
    for manager in managers:
        parts += [_title(manager), _table(manager), _misses(manager), Text()]
    if not managers:
        parts.append(Text(f"no manager shows its figures in {where}"))
    parts += [Text(f"not readable: {why}", "yellow") for why in refused]
    return Group(*parts)


def _title(manager: ManagerRecord) -> Text:
    number = f".{manager['manager']}" if manager["manager"] else ""
    facts = [
        f"kvtier {manager['version']}",
        f"up {_duration(manager['up_s'])}",
        f"{_number(manager['steps_per_s'])} steps/s",
        f"{manager['requests']} requests",
    ]
    if manager["last_step_s"] > 2:
        facts.append(f"last step {_duration(manager['last_step_s'])} ago")
    title = Text(f"{manager['pid']}{number}", "bold", no_wrap=True, overflow="ellipsis")
    return title.append(f"  {', '.join(facts)}  {manager['command']}", "not bold")


def _table(manager: ManagerRecord) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for name in _COLUMNS:
        table.add_column(name, justify="left" if name in ("tier", "breakers") else "right")
    for tier in manager["tiers"]:
        table.add_row(*_row(tier))
    return table


def _row(tier: TierRecord) -> list[Text]:
    latency = tier["load_latency_s"] or {}
    breakers = tier["breakers"]
    states = "-" if breakers is None else f"{breakers['load']}/{breakers['store']}"
    bad = breakers is not None and set(breakers.values()) != {"closed"}
    cells = [
        tier["name"],
        format_size(tier["used_bytes"]),
        format_size(tier["capacity_bytes"]),
        *(_percent(tier["hit_rate"][window]) for window in ("10s", "60s", "start")),
        _speed(tier["store_bytes_per_s"]),
        _speed(tier["load_bytes_per_s"]),
        _count(tier["jobs"]),
        "-" if tier["queued_bytes"] is None else format_size(tier["queued_bytes"]),
        _milliseconds(latency.get("p50")),
        _milliseconds(latency.get("p99")),
    ]
    return [
        *map(Text, cells),
        Text(states, "bold red" if bad else ""),
        Text(_count(tier["sheds"]), "yellow" if tier["sheds"] else ""),
    ]


def _misses(manager: ManagerRecord) -> Text:
    if not manager["misses"]:
        return Text("misses: nothing but keys that were never stored", "dim")
    reasons = (
        f"{miss['tier']}: {miss['reason']} {miss['last_60s']:,} ({miss['since_start']:,})"
        for miss in manager["misses"]
    )
    return Text("misses, last minute (since start): " + "; ".join(reasons))


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.1%}"


def _speed(bytes_per_s: float | None) -> str:
    return "-" if bytes_per_s is None else f"{bytes_per_s / 1e9:.2f} GB"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"


def _count(count: int | None) -> str:
    return "-" if count is None else f"{count:,}"


def _milliseconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1e3:.2f} ms"


def _duration(seconds: float) -> str:
    for unit, length in (("d", 86_400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.1f} {unit}"
    return f"{seconds:.0f} s"
