from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from kvtier import store

ROOT = Path(__file__).parents[1]


def test_the_library_example_runs(tmp_path: Path) -> None:
    text = (ROOT / "README.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert "/tmp/kvtier-store" in code
    code = code.replace("/tmp/kvtier-store", str(tmp_path))
    code += "\nassert (manager.stats()['primary']['loaded_chunks']) == 2\n"
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True, timeout=60)
    assert store.inspect(tmp_path)["chunks"] == 2


def test_make_targets_in_the_readme_exist() -> None:
    targets = set(re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for page in ("README.md", "CONTRIBUTING.md"):
        text = (ROOT / page).read_text()
        wanted = set(re.findall(r"(?:`|^)make ([a-z][a-z-]*)", text, re.MULTILINE))
        assert wanted, page
        assert wanted <= targets, page
