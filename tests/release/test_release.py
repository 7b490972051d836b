"""What is released can be installed by somebody who has nothing of ours, and works there."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.timeout(1200)

ROOT = Path(__file__).parents[2]
DIST = ROOT / os.environ["KVTIER_DIST"]
TAG = "cp311-abi3-manylinux2014_x86_64.manylinux_2_17_x86_64"


def the(pattern: str) -> Path:
    """The one file of the distribution with such a name."""
    (found,) = DIST.glob(pattern)
    return found


def run(*command: str | Path, **settings: str) -> str:
    done = subprocess.run(
        [str(part) for part in command],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, **settings},
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
    return done.stdout


def test_one_wheel_is_for_every_python_and_for_old_systems() -> None:
    wheel = the("*.whl")
    assert wheel.name.endswith(f"-{TAG}.whl")
    # That the name promises no more than the file keeps:
    shown = run(sys.executable, "-m", "auditwheel", "show", wheel)
    assert "manylinux_2_17_x86_64" in shown


def test_the_wheel_lists_its_parts() -> None:
    with zipfile.ZipFile(the("*.whl")) as wheel:
        names = wheel.namelist()
        (parts,) = [name for name in names if re.search(r"\.dist-info/sboms/.*\.json$", name)]
        listed = {part["name"] for part in json.loads(wheel.read(parts))["components"]}
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)
    assert {"kvtier/py.typed", "kvtier/_kvtier.pyi", "kvtier/_kvtier.abi3.so"} <= set(names)
    command = ("cargo", "tree", "--package", "kvtier-py", "--edges", "normal", "--prefix", "none")
    linked = {line.split()[0] for line in run(*command).splitlines()} - {"kvtier-py"}
    assert "kvtier-core" in linked
    assert linked <= listed, linked - listed


def test_the_source_distribution_builds_and_works_where_nothing_is(tmp_path: Path) -> None:
    source = the("*.tar.gz")
    with tarfile.open(source) as archive:
        members = {name.partition("/")[2] for name in archive.getnames()}
    assert {"Cargo.lock", "LICENSE", "README.md", "pyproject.toml"} <= members

    run(sys.executable, "-m", "venv", tmp_path / "venv")
    python = tmp_path / "venv" / "bin" / "python"
    (site,) = (tmp_path / "venv" / "lib").glob("python*/site-packages")
    # Torch is large: the packages of this environment are seen behind the new one's own.
    seen = [path for path in sys.path if Path(path).name == "site-packages"]
    (site / "zz_shared.pth").write_text("\n".join(seen))
    run(
        *(python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"),
        *("--no-deps", "--no-build-isolation", "--force-reinstall", "--no-cache-dir", source),
        CARGO_TARGET_DIR=str(ROOT / "target"),  # where most of it is built already
        PATH=f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    )
    own = run(python, "-c", "import kvtier; print(kvtier.__file__)", PYTHONPATH="")
    assert Path(own.strip()).is_relative_to(site)

    kvtier = tmp_path / "venv" / "bin" / "kvtier"
    demo = run(kvtier, "demo", "--json", "--dir", tmp_path / "store", PYTHONPATH="")
    assert json.loads(demo)["bytes_equal"] is True
    run(kvtier, "verify", tmp_path / "store", PYTHONPATH="")
