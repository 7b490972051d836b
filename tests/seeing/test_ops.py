"""The dashboard and the alerts fit what is exported."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from kvtier.cli import main

from .conftest import make_manager
from .promtool import needs_promtool, promtool

OPS = Path(__file__).parents[2] / "ops"
RULES = OPS / "prometheus" / "alerts.yml"
DASHBOARD = OPS / "grafana" / "kvtier.json"


def dashboard() -> Any:
    return json.loads(DASHBOARD.read_text())


def queries() -> Iterator[str]:
    for panel in dashboard()["panels"]:
        yield from (target["expr"] for target in panel.get("targets", ()))


def metrics(query: str) -> set[str]:
    """The metrics that a query names; of a histogram, its name without `_bucket`."""
    return {name.removesuffix("_bucket") for name in re.findall(r"\bkvtier_\w+", query)}


@pytest.fixture
def exported(directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> set[str]:
    """The names of all metrics of a manager with every kind of tier."""
    assert directory.exists()
    disk = {"type": "file", "path": str(tmp_path / "store"), "capacity_bytes": 1 << 20}
    # Nothing is connected to before a look-up.
    network = {"type": "redis", "url": "redis://127.0.0.1"}
    manager = make_manager([{"type": "memory", "capacity_bytes": 1 << 20}, disk, network])
    assert main(["exporter", "--once"]) == 0
    families = text_string_to_metric_families(capsys.readouterr().out)
    names = {family.name + ("_total" if family.type == "counter" else "") for family in families}
    manager.shutdown()
    return names


def test_the_dashboard_is_what_its_program_writes() -> None:
    spec = importlib.util.spec_from_file_location("generate", OPS / "grafana" / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    program = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "generate", program)
        spec.loader.exec_module(program)
        assert program.dashboard() == dashboard(), "run python ops/grafana/generate.py"


def test_the_dashboard_shows_every_metric_and_no_other(exported: set[str]) -> None:
    assert set().union(*map(metrics, queries())) == exported


def test_panels_do_not_overlap_and_have_numbers_of_their_own() -> None:
    panels = dashboard()["panels"]
    cells = [
        (x, y)
        for place in (panel["gridPos"] for panel in panels)
        for x in range(place["x"], place["x"] + place["w"])
        for y in range(place["y"], place["y"] + place["h"])
    ]
    assert len(cells) == len(set(cells))
    assert max(x for x, _ in cells) < 24
    assert len({panel["id"] for panel in panels}) == len(panels)


def test_variables_are_labels_that_exist(exported: set[str]) -> None:
    variables = {variable["name"]: variable for variable in dashboard()["templating"]["list"]}
    assert set(variables) == {"datasource", "pid", "tier"}
    for name in ("pid", "tier"):
        assert metrics(variables[name]["query"]) <= exported
    used = set(re.findall(r"\$(\w+)", " ".join(queries())))
    assert used <= {*variables, "__rate_interval"}


@needs_promtool
def test_queries_of_the_dashboard_are_promql(tmp_path: Path) -> None:
    rules = [
        {"record": f"panel:{number}", "expr": query.replace("$__rate_interval", "1m")}
        for number, query in enumerate(queries())
    ]
    path = tmp_path / "rules.json"  # JSON is YAML
    path.write_text(json.dumps({"groups": [{"name": "dashboard", "rules": rules}]}))
    assert promtool("check", "rules", str(path)) == ""


@needs_promtool
@pytest.mark.parametrize("arguments", [("check", "rules"), ("test", "rules")])
def test_alerts_are_valid_and_fire_when_they_should(arguments: tuple[str, str]) -> None:
    path = RULES if arguments[0] == "check" else RULES.with_name("alerts_test.yml")
    assert promtool(*arguments, str(path)) == ""


def test_alerts_are_about_metrics_that_exist(exported: set[str]) -> None:
    expressions = re.findall(r"expr: (.*?)\n +(?:for|labels):", RULES.read_text(), re.DOTALL)
    assert len(expressions) == RULES.read_text().count("- alert:")
    assert set().union(*map(metrics, expressions)) <= exported


def alerts(text: str) -> set[str]:
    return set(re.findall(r"\bKvtier[A-Z]\w+", text))


def test_every_alert_is_tried_both_ways() -> None:
    quiet, *loud = RULES.with_name("alerts_test.yml").read_text().split("  - name: ")[1:]
    assert alerts(quiet) == alerts(RULES.read_text())
    assert alerts("".join(loud)) == alerts(RULES.read_text())


def headings(page: str) -> set[str]:
    titles: list[str] = re.findall(r"^#+ (.*)$", page, re.MULTILINE)
    return {re.sub(r"[^a-z0-9 -]", "", title.lower()).replace(" ", "-") for title in titles}


def test_every_alert_has_its_section_in_the_handbook() -> None:
    page = (OPS.parent / "docs" / "operations.md").read_text()
    runbooks = re.findall(r"runbook: (\S+)#(\S+)", RULES.read_text())
    assert len(runbooks) == len(alerts(RULES.read_text()))
    assert {path for path, _ in runbooks} == {"docs/operations.md"}
    assert {anchor for _, anchor in runbooks} <= headings(page)
    assert alerts(RULES.read_text()) <= alerts(page)
