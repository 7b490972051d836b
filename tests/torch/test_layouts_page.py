"""docs/layouts.md: its code runs, one block after the other, and asserts what it draws."""

import re
import subprocess
import sys
from pathlib import Path

from kvtier.torch import KVLayout

PAGE = Path(__file__).parents[2] / "docs" / "layouts.md"


def test_the_code_of_the_page_runs() -> None:
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert len(blocks) >= 10
    assert all("assert" in block for block in blocks[1:])
    code = "".join(blocks)
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True, timeout=100)


def test_every_layout_is_drawn() -> None:
    rows = re.findall(
        r"^\| `(\w+)` \| `\(([^)]*)\)` \| `([^`]*)` \|", PAGE.read_text(), re.MULTILINE
    )
    assert len(rows) == len(KVLayout)
    for name, view, memory in rows:
        layout = KVLayout[name]
        assert "".join(axis.value for axis in layout.view) == view.replace(", ", "")
        assert "".join(axis.value for axis in layout.memory) == memory.replace(" ", "")
