"""What pages show that needs vLLM."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from tests.docs.run_page import steps

ROOT = Path(__file__).parents[2]
PAGES = [
    page
    for page in sorted((ROOT / "docs").rglob("*.md"))
    if any(step.need == "vllm" for step in steps(page.read_text()))
]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_what_a_page_shows_works_with_vllm(page: Path, tmp_path: Path) -> None:
    program = str(ROOT / "tests" / "docs" / "run_page.py")
    command = [sys.executable, program, str(page), "--with", "vllm"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
