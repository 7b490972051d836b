"""Writes `kvtier.json`, the Grafana dashboard; run it after a change, and commit both.

    python ops/grafana/generate.py

The panels are below, row by row: a title, the unit of Grafana, and queries with their legends.
`$pid` and `$tier` in a legend or query are the dashboard's variables and labels. Tests compare
the file with this program, and its queries with what `kvtier exporter` exports.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

DASHBOARD = Path(__file__).with_name("kvtier.json")
DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}
WIDTH, HEIGHT = 8, 7
MANAGER = "{{instance}} {{pid}}.{{manager}}"
TIER = MANAGER + " {{tier}}"
DIRECTION = TIER + " {{direction}}"
OF_MANAGER = '{pid=~"$pid"}'
OF_TIER = '{pid=~"$pid", tier=~"$tier"}'


@dataclass(frozen=True)
class Panel:
    """A graph; `queries` are pairs of a query and the legend of its lines."""

    title: str
    unit: str
    queries: tuple[tuple[str, str], ...]
    kind: str = "timeseries"


def gauge(metric: str, labels: str = OF_TIER) -> str:
    return f"{metric}{labels}"


def rate(metric: str, labels: str = OF_TIER) -> str:
    return f"rate({metric}{labels}[$__rate_interval])"


def primary_lookups(result: str) -> str:
    return rate("kvtier_primary_lookups_total", f'{{pid=~"$pid", result="{result}"}}')


def quantile(share: float) -> str:
    buckets = rate("kvtier_tier_job_duration_seconds_bucket")
    by = "instance, uid, pid, manager, tier, direction, le"
    return f"histogram_quantile({share}, sum by ({by}) ({buckets}))"


ROWS: dict[str, tuple[Panel, ...]] = {
    "Processes": (
        Panel(
            "Managers",
            "short",
            ((gauge("kvtier_manager_info", OF_MANAGER), MANAGER + ": {{version}}"),),
            "table",
        ),
        Panel("Tiers", "short", ((gauge("kvtier_tier_info"), TIER + ": {{medium}}"),), "table"),
        Panel("Unreadable stats pages", "short", (("kvtier_unreadable_pages", "{{instance}}"),)),
        Panel("Steps", "ops", ((rate("kvtier_steps_total", OF_MANAGER), MANAGER),)),
        Panel("Open requests", "short", ((gauge("kvtier_open_requests", OF_MANAGER), MANAGER),)),
        Panel(
            "Age, and time since the last step",
            "s",
            (
                (
                    "time() - " + gauge("kvtier_manager_start_time_seconds", OF_MANAGER),
                    MANAGER + " age",
                ),
                (
                    "time() - " + gauge("kvtier_last_step_timestamp_seconds", OF_MANAGER),
                    MANAGER + " last step",
                ),
            ),
        ),
    ),
    "Hits": (
        Panel(
            "Hit rate of the primary tier",
            "percentunit",
            (
                (
                    f"{primary_lookups('hit')} / ignoring (result) "
                    f"({primary_lookups('hit')} + ignoring (result) {primary_lookups('miss')})",
                    MANAGER,
                ),
            ),
        ),
        Panel(
            "Hit rate of tiers",
            "percentunit",
            ((f"{rate('kvtier_tier_hits_total')} / {rate('kvtier_tier_lookups_total')}", TIER),),
        ),
        Panel(
            "Keys looked up",
            "ops",
            ((rate("kvtier_primary_lookups_total", OF_MANAGER), MANAGER + " {{result}}"),),
        ),
    ),
    "Primary tier": (
        Panel(
            "Chunks and slots",
            "short",
            tuple(
                (gauge(f"kvtier_primary_{name}", OF_MANAGER), f"{MANAGER} {name}")
                for name in (
                    "slots", "ready_chunks", "writing_chunks", "pinned_chunks", "detached_slots",
                )
            ),
        ),
        Panel(
            "Moved by the engine",
            "Bps",
            tuple(
                (
                    rate(f"kvtier_primary_{verb}_chunks_total", OF_MANAGER)
                    + " * "
                    + gauge("kvtier_slot_bytes", OF_MANAGER),
                    f"{MANAGER} {verb}",
                )
                for verb in ("stored", "loaded")
            ),
        ),
        Panel(
            "Evicted and refused",
            "ops",
            tuple(
                (rate(f"kvtier_primary_{name}_total", OF_MANAGER), f"{MANAGER} {name}")
                for name in (
                    "evicted_chunks", "refused_stores", "refused_promotions", "not_admitted_chunks",
                )
            ),
        ),
    ),
    "Tiers": (
        Panel(
            "Fill",
            "percentunit",
            ((f"{gauge('kvtier_tier_used_bytes')} / {gauge('kvtier_tier_capacity_bytes')}", TIER),),
        ),
        Panel("Chunks", "short", ((gauge("kvtier_tier_chunks"), TIER),)),
        Panel("Evicted", "ops", ((rate("kvtier_tier_evicted_chunks_total"), TIER),)),
        Panel("Moved", "Bps", ((rate("kvtier_tier_moved_bytes_total"), DIRECTION),)),
        Panel("Chunks moved", "ops", ((rate("kvtier_tier_moved_chunks_total"), DIRECTION),)),
        Panel("Workers busy", "short", ((rate("kvtier_tier_busy_seconds_total"), DIRECTION),)),
        Panel(
            "Time of jobs",
            "s",
            ((quantile(0.5), DIRECTION + " p50"), (quantile(0.99), DIRECTION + " p99")),
        ),
        Panel("Jobs", "short", ((gauge("kvtier_tier_running_jobs"), DIRECTION),)),
        Panel("Stores under way", "bytes", ((gauge("kvtier_tier_queued_bytes"), TIER),)),
    ),
    "Trouble": (
        Panel(
            "Breakers that are not closed",
            "short",
            (
                (
                    'kvtier_tier_breaker{pid=~"$pid", tier=~"$tier", state!="closed"}',
                    DIRECTION + " {{state}}",
                ),
            ),
        ),
        Panel("Breakers opened", "ops", ((rate("kvtier_tier_breaker_opened_total"), DIRECTION),)),
        Panel(
            "Chunks not moved",
            "ops",
            ((rate("kvtier_tier_failed_chunks_total"), DIRECTION + " {{cause}}"),),
        ),
        Panel(
            "Overdue",
            "ops",
            (
                (rate("kvtier_tier_overdue_jobs_total"), DIRECTION + " jobs"),
                (rate("kvtier_tier_overdue_lookups_total"), TIER + " look-ups"),
            ),
        ),
        Panel("Slots in quarantine", "short", ((gauge("kvtier_tier_quarantined_slots"), TIER),)),
        Panel("Contract broken", "ops", ((rate("kvtier_tier_faults_total"), TIER + " {{kind}}"),)),
        Panel("At servers", "ops", ((rate("kvtier_tier_details_total"), TIER + " {{what}}"),)),
        Panel(
            "Stores shed or refused",
            "ops",
            (
                (rate("kvtier_tier_shed_chunks_total"), TIER + " shed"),
                (rate("kvtier_tier_refused_chunks_total"), TIER + " refused"),
            ),
        ),
        Panel(
            "Back-pressure",
            "short",
            (
                (gauge("kvtier_tier_under_pressure"), TIER + " under pressure"),
                (gauge("kvtier_tier_store_seconds_per_byte") + " * 2 ^ 30", TIER + " s for a GiB"),
            ),
        ),
        Panel(
            "Free on the device",
            "percentunit",
            (
                (
                    gauge("kvtier_tier_device_free_bytes")
                    + " / "
                    + gauge("kvtier_tier_device_size_bytes"),
                    TIER,
                ),
            ),
        ),
    ),
}  # fmt: skip


def dashboard() -> dict[str, Any]:
    """The dashboard, as Grafana imports it."""
    panels: list[dict[str, Any]] = []
    top = 0
    for title, row in ROWS.items():
        place = {"h": 1, "w": 24, "x": 0, "y": top}
        panels.append({"id": len(panels) + 1, "type": "row", "title": title, "gridPos": place})
        top += 1
        for number, panel in enumerate(row):
            x, y = number % 3 * WIDTH, top + number // 3 * HEIGHT
            place = {"h": HEIGHT, "w": WIDTH, "x": x, "y": y}
            panels.append({"id": len(panels) + 1, "gridPos": place, **_panel(panel)})
        top += -(-len(row) // 3) * HEIGHT
    return {
        "uid": "kvtier",
        "title": "kvtier",
        "tags": ["kvtier"],
        "schemaVersion": 39,
        "editable": True,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {
            "list": [
                {"name": "datasource", "type": "datasource", "query": "prometheus"},
                _variable("pid", "kvtier_manager_info"),
                _variable("tier", 'kvtier_tier_info{pid=~"$pid"}'),
            ]
        },
        "panels": panels,
    }


def _panel(panel: Panel) -> dict[str, Any]:
    table = panel.kind == "table"
    targets = [
        {
            "refId": "ABCDEFGH"[number],
            "datasource": DATASOURCE,
            "expr": query,
            "legendFormat": legend,
            **({"instant": True, "format": "table"} if table else {}),
        }
        for number, (query, legend) in enumerate(panel.queries)
    ]
    return {
        "type": panel.kind,
        "title": panel.title,
        "datasource": DATASOURCE,
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0}, "overrides": []},
        "targets": targets,
    }


def _variable(label: str, metric: str) -> dict[str, Any]:
    return {
        "name": label,
        "type": "query",
        "datasource": DATASOURCE,
        "query": f"label_values({metric}, {label})",
        "refresh": 2,
        "multi": True,
        "includeAll": True,
        "allValue": ".*",
        "current": {"text": "All", "value": "$__all"},
    }


if __name__ == "__main__":
    DASHBOARD.write_text(json.dumps(dashboard(), indent=1) + "\n")
