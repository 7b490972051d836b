"""The questions of `kvtier bench` that have vLLM as their reference, small. No speed is judged."""

import json
import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    ("question", "flags"),
    [
        ("index", ("--keys", "300", "--batches", "2")),
        ("manager", ("--keys", "64")),
        ("scheduler", ("--requests", "3", "--tokens", "640")),
    ],
)
def test_figures_are_taken_beside_vllm(question: str, flags: tuple[str, ...]) -> None:
    command = [sys.executable, "-m", "kvtier", "bench", question, "--rounds", "1", "--json"]
    done = subprocess.run([*command, *flags], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["versions"]["vllm"]
    beside = [figure for figure in report["figures"] if figure["name"].endswith(".vllm")]
    assert beside
    assert all(figure["reference"].startswith("vLLM ") for figure in beside)
    assert all(figure["ratio"] > 0 for figure in beside)
