"""The documentation is true: its code runs, its commands work, its links and targets are there."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from tests.docs.run_page import PageError, steps

from kvtier import config
from kvtier.tiers import SecondaryTier
from kvtier.torch import KVLayout

ROOT = Path(__file__).parents[2]
RUNNER = Path(__file__).with_name("run_page.py")
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
RUN = [page for page in PAGES if any(step.need is None for step in steps(page.read_text()))]


def run_page(page: Path, directory: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "error", str(RUNNER), str(page)],
        cwd=directory,
        capture_output=True,
        text=True,
        check=False,
        timeout=115,
    )


@pytest.mark.parametrize("page", RUN, ids=lambda page: str(page.relative_to(ROOT)))
def test_what_a_page_shows_works(page: Path, tmp_path: Path) -> None:
    done = run_page(page, tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_page_that_is_wrong_fails_where_it_is_wrong(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    for wrong, word in (
        ("text\n\n```python\nx = 1\nx / 0\n```\n", 'page.md", line 5'),
        ("```sh\nfalse\n```\n", "returned non-zero"),
        ("```sh\ntrue | false | true\n```\n", "returned non-zero"),
        ("```sh\necho 1\n```\n\n<!-- run: is=output -->\n```text\n2\n```\n", "PageError"),
        ("```json\n{,}\n```\n", "JSONDecodeError"),
        ("```python\nx = 1\n```\n\n<!-- check\nassert x == 2\n-->\n", "AssertionError"),
    ):
        page.write_text(wrong)
        done = run_page(page, tmp_path)
        assert done.returncode == 1, wrong
        assert word in done.stderr


def test_no_block_of_a_page_is_passed_over_by_mistake() -> None:
    for wrong in ("```bash\nls\n```\n", "<!-- run: needs=luck -->\n```sh\nls\n```\n"):
        with pytest.raises(PageError):
            list(steps(wrong))
    for page in PAGES:
        text = page.read_text()
        blocks = [step for step in steps(text) if not step.code.startswith("\n")]
        assert len(re.findall(r"^ *```", text, re.MULTILINE)) == 2 * len(blocks), page


def test_make_targets_on_pages_exist() -> None:
    targets = set(re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for page in PAGES:
        wanted = set(re.findall(r"(?:`|^)make ([a-z][a-z-]*)", page.read_text(), re.MULTILINE))
        assert wanted <= targets, page


def test_every_target_is_explained() -> None:
    makefile = (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"^([a-z][a-z-]*):.*## ", makefile, re.MULTILINE))
    explained = set(
        re.findall(r"`make ([a-z][a-z-]*)", (ROOT / "CONTRIBUTING.md").read_text(), re.MULTILINE)
    )
    assert targets == explained


def test_links_lead_to_files() -> None:
    for page in PAGES:
        for link in re.findall(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)", page.read_text()):
            assert (page.parent / link).exists(), f"{page}: {link}"


def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    reference = (tmp_path / "reference" / "core" / "index.html").read_text()
    assert "Drops known keys, evicts what is needed" in reference  # out of the stubs
    assert (
        tmp_path / "source" / "rust" / "kvtier-core" / "src" / "lib.rs" / "index.html"
    ).is_file()


def test_the_figures_of_the_performance_page_are_those_of_its_reports(tmp_path: Path) -> None:
    program = str(ROOT / "benches" / "performance_page.py")
    subprocess.run([sys.executable, program, "--out", str(tmp_path)], check=True)
    page = (tmp_path / "performance.md").read_text()
    assert page == (ROOT / "docs" / "performance.md").read_text()
    plots = set(re.findall(r"\]\((performance/\w+\.svg)\)", page))
    assert plots
    for plot in plots:
        assert (tmp_path / plot).read_text().startswith("<?xml")
        assert (ROOT / "docs" / plot).is_file()


def test_every_layout_is_drawn() -> None:
    page = (ROOT / "docs" / "layouts.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \| `\(([^)]*)\)` \| `([^`]*)` \|", page, re.MULTILINE)
    assert len(rows) == len(KVLayout)
    for name, view, memory in rows:
        layout = KVLayout[name]
        assert "".join(axis.value for axis in layout.view) == view.replace(", ", "")
        assert "".join(axis.value for axis in layout.memory) == memory.replace(" ", "")


def test_every_field_and_method_of_a_tier_is_on_its_page() -> None:
    page = (ROOT / "docs" / "tiers.md").read_text()
    table = re.findall(r"^\| `.*$", page, re.MULTILINE)
    named = set(re.findall(r"`([a-z_]+)(?:\([a-z]*\))?`", "".join(table)))
    assert set(config.TierLimits.__annotations__) <= named
    assert {name for name in vars(SecondaryTier) if not name.startswith("_")} <= {
        *named,
        "medium",
        "locality",
    }
