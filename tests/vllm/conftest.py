"""Engines to run: one process each, and what came out of it."""

from __future__ import annotations

import importlib.util
import json
import os
import random
import signal
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
VOCABULARY = 512
BLOCK = 32
ENGINE_SECONDS = 600
FAILED_OUTPUT = 6_000

# `make test` has no vLLM; `make test-vllm` does.
collect_ignore_glob = [] if importlib.util.find_spec("vllm") else ["test_*.py"]


@contextmanager
def quiet_imports() -> Iterator[None]:
    """vLLM warns about its own imports, and warnings are errors here."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def prompts(*lengths: int, seed: int = 1) -> list[list[int]]:
    """Random prompts; the same for the same arguments."""
    rng = random.Random(seed)
    return [[rng.randrange(VOCABULARY) for _ in range(length)] for length in lengths]


def one_by_one(label: str, *prompts: list[int], **act: Any) -> list[dict[str, Any]]:
    """Acts that serve prompts one after the other, so that each evicts those before it."""
    return [{"act": "generate", "label": label, "prompts": [prompt], **act} for prompt in prompts]


def spec(**fields: Any) -> dict[str, Any]:
    """`kv_connector_extra_config`."""
    names = {"spec_name": "KVTierOffloadingSpec", "spec_module_path": "kvtier.integrations.vllm"}
    return {**names, "cpu_bytes_to_use": 1 << 24, **fields}


@dataclass(frozen=True)
class Outcome:
    """What an engine gave: of each act, with its label, and its metrics at the end."""

    acts: list[tuple[str | None, Any]]
    metrics: dict[str, float]

    def of(self, label: str) -> list[Any]:
        """What the acts of this label gave."""
        found = [result for name, result in self.acts if name == label]
        assert found, label
        return found

    def cached(self, label: str) -> list[int]:
        """Tokens that each request did not compute."""
        return [request["cached"] for requests in self.of(label) for request in requests]

    def answers(self, label: str) -> list[Any]:
        """Tokens and log-probabilities of each request."""
        return [
            (request["tokens"], request["logprobs"])
            for requests in self.of(label)
            for request in requests
        ]


Run = Callable[..., Outcome]


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("models")
    _run([sys.executable, str(HERE / "models.py"), str(directory)], os.environ)
    return directory


@pytest.fixture(scope="session")
def run(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Runs acts in an engine of its own; `processes` as `vllm serve` has them, else in one."""

    def run(
        acts: list[dict[str, Any]],
        connector: dict[str, Any] | None,
        *,
        model: str = "full",
        processes: bool = False,
        events: str | None = None,
        **engine: Any,
    ) -> Outcome:
        directory = tmp_path_factory.mktemp("engine")
        settings = {
            "model": str(models / model),
            "skip_tokenizer_init": True,
            "enforce_eager": True,
            "dtype": "bfloat16",
            "block_size": BLOCK,
            "num_gpu_blocks_override": 24,
            "max_model_len": 704,
            "disable_log_stats": False,
            **({} if processes else {"distributed_executor_backend": "uni"}),
            **engine,
        }
        scenario = {"engine": settings, "connector": connector, "events": events, "acts": acts}
        (directory / "in").write_text(json.dumps(scenario))
        environment = {
            **os.environ,
            "HF_HUB_OFFLINE": "1",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_ENABLE_V1_MULTIPROCESSING": str(int(processes)),
        }
        if engine.get("tensor_parallel_size") == 2:
            environment["VLLM_CPU_OMP_THREADS_BIND"] = "0|1"
        command = [sys.executable, str(HERE / "engine_run.py")]
        _run([*command, str(directory / "in"), str(directory / "out")], environment)
        return Outcome(**json.loads((directory / "out").read_text()))

    return run


@pytest.fixture(autouse=True)
def no_note_left() -> Iterator[None]:
    """Every engine removes the note by which its processes met."""
    before = set(Path("/dev/shm").glob("kvtier-*.json"))
    yield
    assert set(Path("/dev/shm").glob("kvtier-*.json")) <= before


def _run(command: list[str], environment: Any) -> None:
    """In a session of its own, so that one that hangs goes with all of its engine's processes."""
    process = subprocess.Popen(
        command,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=ENGINE_SECONDS)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
    if process.returncode:
        pytest.fail(f"{command}\n{output[-FAILED_OUTPUT:]}", pytrace=False)
