"""GPU tests and figures with the wheel that is installed. Builds nothing: the abi3 wheel travels.

    python benches/gpu.py [--tests] [--figures] [--out FOLDER]

Both parts run unless one is named. FOLDER gets `tests.xml` and one `DEVICE.json` of
`kvtier bench transfer` a device. Exits with 1 when a test fails or a figure can not be taken, and
with 2 where there is no GPU or no wheel.
"""

from __future__ import annotations

import argparse
import importlib.util
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
_FOR_TESTS = ("pytest", "pytest_timeout", "hypothesis")


def missing(*, tests: bool) -> str | None:
    """What this machine lacks."""
    for name in ("torch", "kvtier", *(_FOR_TESTS if tests else ())):
        if importlib.util.find_spec(name) is None:
            return f"{name} is not installed for {sys.executable}"
    import torch

    return None if torch.cuda.is_available() else "torch sees no GPU"


def run_tests(out: Path | None) -> int:
    report = [] if out is None else [f"--junitxml={out / 'tests.xml'}"]
    command = ["-m", "pytest", "-m", "gpu", *report, "tests/torch", "tests/doctor"]
    return subprocess.run([sys.executable, *command], cwd=ROOT, check=False).returncode


def take_figures(out: Path | None) -> int:
    worst = 0
    for device in ("cuda", "cpu"):
        command = [sys.executable, "-m", "kvtier", "bench", "transfer", "--device", device]
        if out is None:
            worst = max(worst, subprocess.run(command, check=False).returncode)
            continue
        done = subprocess.run([*command, "--json"], check=False, stdout=subprocess.PIPE)
        (out / f"{device}.json").write_bytes(done.stdout)
        sys.stdout.write(done.stdout.decode())
        worst = max(worst, done.returncode)
    return worst


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--tests", action="store_true", help="only the tests")
    parser.add_argument("--figures", action="store_true", help="only the figures")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="keep the results here")
    arguments = parser.parse_args()
    tests = arguments.tests or not arguments.figures
    figures = arguments.figures or not arguments.tests
    why = missing(tests=tests)
    if why is not None:
        print(f"gpu.py: {why}", file=sys.stderr)
        return 2
    if arguments.out is not None:
        arguments.out.mkdir(parents=True, exist_ok=True)
    codes = [run_tests(arguments.out)] if tests else []
    codes += [take_figures(arguments.out)] if figures else []
    return min(1, max(codes))


if __name__ == "__main__":
    sys.exit(main())
