"""docs/operations.md says what there is."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtier.cli.top_figures import ManagerRecord, MissReason, TierRecord
from kvtier.cli.top_screen import _COLUMNS
from kvtier.config import PrimaryStats, TierStats

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "operations.md").read_text()


def log_lines() -> Iterator[str]:
    """The texts of all warnings and errors, with their blanks as in the sources."""
    in_rust = re.compile(r'(?:log::(?:warn|error)!|limited!)\([^"]*?"((?:[^"\\]|\\.)*)"', re.DOTALL)
    in_python = re.compile(r'_log\.(?:warning|error)\(\s*((?:"[^"]*"\s*)+)')
    for path in (ROOT / "rust").glob("*/src/**/*.rs"):
        yield from in_rust.findall(path.read_text())
    for path in (ROOT / "python").rglob("*.py"):
        for text in in_python.findall(path.read_text()):
            yield "".join(re.findall(r'"([^"]*)"', text))


def test_every_log_line_is_in_the_handbook() -> None:
    lines = list(log_lines())
    assert len(lines) > 20
    for line in lines:
        parts = re.split(r"\{[^}]*\}|%[sd]", line)
        fixed = max(parts, key=len).strip(' :;,"\\')
        # The page may cut a long line short; what is only blanks is made elsewhere.
        assert fixed[:50] in PAGE or len(fixed) < 6, f"say what {line!r} means, and what to do"


def test_the_columns_of_top_are_explained() -> None:
    (capture,) = re.findall(r"```\n(.*?kvtier \d.*?)```", PAGE, re.DOTALL)
    header = next(line for line in capture.splitlines() if line.strip().startswith("tier"))
    assert header.split() == " ".join(_COLUMNS).split()
    explained = "".join(re.findall(r"^\| ([a-z0-9/, ]+) \|", PAGE, re.MULTILINE))
    for column in _COLUMNS:
        assert column.split()[0] in ("tier", "1min", "start") or column.split()[0] in explained


def test_the_json_of_top_has_the_fields_that_are_shown() -> None:
    (text,) = re.findall(r"```json\n(.*?)```", PAGE, re.DOTALL)
    shown = json.loads(text)
    (manager,) = shown["managers"]
    assert list(manager) == list(ManagerRecord.__annotations__)
    assert list(manager["tiers"][0]) == list(TierRecord.__annotations__)
    assert list(manager["misses"][0]) == list(MissReason.__annotations__)


def test_figures_that_the_page_names_exist() -> None:
    named = set(re.findall(r"`((?:load|store)s?_[a-z_]+)(?:\.[a-z]+)?`", PAGE))
    settings = {"load_share", "load_deadline_s", "store_deadline_s", "store_threshold"}
    assert named - settings
    assert named - settings <= {*PrimaryStats.__annotations__, *TierStats.__annotations__}


@pytest.mark.usefixtures("directory")
def test_the_load_of_the_capture_runs_and_is_shown(tmp_path: Path) -> None:
    load = [sys.executable, str(ROOT / "examples" / "replayed_load.py"), "--dir", str(tmp_path)]
    top = [sys.executable, "-m", "kvtier", "top", "--json", "--interval", "0.1"]
    with (
        subprocess.Popen([*load, "--seconds", "100"]) as chats,
        subprocess.Popen(top, stdout=subprocess.PIPE, text=True) as shown,
    ):
        assert shown.stdout is not None
        for line in shown.stdout:
            tiers = [tier for manager in json.loads(line)["managers"] for tier in manager["tiers"]]
            loads = [tier["load_bytes_per_s"] for tier in tiers]
            if len(tiers) == 3 and all(loads):
                break
        assert chats.poll() is None, "chunks come from every tier"
        chats.kill()
        shown.kill()
    assert [tier["name"] for tier in tiers] == ["primary", "memory", "disk"]
