"""The example of docs/tiers.md runs, and is a tier."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from kvtier import config
from kvtier.tiers import SecondaryTier

PAGE = (Path(__file__).parents[2] / "docs" / "tiers.md").read_text()


def test_the_example_passes_its_suite(tmp_path: Path) -> None:
    tier, use, suite = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    (tmp_path / "sqlite_tier.py").write_text(tier)
    (tmp_path / "test_sqlite_tier.py").write_text("import sqlite_tier\n" + suite)
    (tmp_path / "store").mkdir()
    use = use.replace("/tmp/kvtier-sqlite", str(tmp_path / "store"))
    (tmp_path / "use.py").write_text(f"import kvtier, sqlite_tier\n{use}\nmanager.shutdown()")
    for command in (
        [sys.executable, "-W", "error", "use.py"],
        [sys.executable, "-m", "pytest", "-q", "-W", "error", "-p", "no:cacheprovider"],
    ):
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=100)
        assert done.returncode == 0, done.stdout + done.stderr
        assert "skipped" not in done.stdout


def test_every_field_and_method_is_on_the_page() -> None:
    table = re.findall(r"^\| `.*$", PAGE, re.MULTILINE)
    named = set(re.findall(r"`([a-z_]+)(?:\([a-z]*\))?`", "".join(table)))
    assert set(config.TierLimits.__annotations__) <= named
    assert {name for name in vars(SecondaryTier) if not name.startswith("_")} <= {
        *named,
        "medium",
        "locality",
    }
