"""The guide and the examples, as they are written."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from tests.vllm.conftest import quiet_imports

with quiet_imports():
    import vllm
    from vllm.v1.kv_offload.cpu.policies.factory import CachePolicyFactory
    from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory

    from kvtier.integrations.vllm.metrics import metric_definitions
    from kvtier.integrations.vllm.settings import Settings, parse_settings

pytestmark = pytest.mark.timeout(600)

ROOT = Path(__file__).parents[2]
GUIDE = (ROOT / "docs" / "vllm.md").read_text()
START_SECONDS = 300
SMALL = {"enforce_eager": True, "block_size": 32, "max_model_len": 1024}


def test_the_configurations_of_the_guide_are_valid() -> None:
    """As whole objects for `--kv-transfer-config`."""
    configurations = [json.loads(block) for block in re.findall(r"```json\n(.*?)```", GUIDE, re.S)]
    tiers = []
    for configuration in configurations:
        assert configuration["kv_connector"] == "OffloadingConnector"
        fields = configuration["kv_connector_extra_config"]
        if fields["spec_name"] == "TieringOffloadingSpec":
            module = fields["cache_policy_module_path"]
            policy = CachePolicyFactory.get_cache_policy_cls(fields["eviction_policy"], module)
            [tier] = fields["secondary_tiers"]
            found = SecondaryTierFactory.get_tier_class(tier)
            tiers.append([f"{found.__name__} {tier['tier']['type']}", policy.policy])
        else:
            settings = parse_settings(fields)
            tiers.append([tier["type"] for tier in settings.tiers])
    assert tiers == [
        [],
        ["file"],
        ["file", "redis"],
        ["vllm"],
        ["KVTierSecondaryTier file", "gittins"],
    ]


def test_the_guide_names_every_setting_and_only_metrics_that_there_are() -> None:
    extra = {"host_bytes": "cpu_bytes_to_use", "policy": "eviction_policy"}
    extra["tiers"] = "secondary_tiers"
    for field in Settings.__dataclass_fields__:
        assert f"`{extra.get(field, field)}`" in GUIDE
    named = set(re.findall(r"`((?:kvtier|vllm):[a-z_]+)`", GUIDE))
    assert named
    declared = metric_definitions().keys()
    assert {name for name in named if name not in declared} <= {
        "vllm:kv_offload_load_bytes",
        "vllm:kv_offload_store_bytes",
        "vllm:kv_offload_config_info",
    }


def test_the_offline_example(models: Path, tmp_path: Path) -> None:
    """Its second round reuses the documents, and so does the first round of a second run."""
    options = {**SMALL, "num_gpu_blocks_override": 40, "dtype": "bfloat16"}
    command = [
        sys.executable, str(ROOT / "examples" / "vllm_offline.py"), str(models / "full"),
        "--disk", str(tmp_path), "--disk-bytes", "67108864", "--host-bytes", "1048576",
        "--documents", "3", "--chapters", "10", "--rounds", "2",
        *(f"--llm={name}={json.dumps(value)}" for name, value in options.items()),
    ]  # fmt: skip
    reused = []
    for _ in range(2):
        done = subprocess.run(command, capture_output=True, text=True, env=environment(tmp_path))
        assert done.returncode == 0, done.stderr[-4000:]
        reused += [int(found) for found in re.findall(r"(\d+) of them reused", done.stdout)]
    assert reused[0] == 0
    assert min(reused[1:]) > 2000


def test_the_server_example(models: Path, tmp_path: Path) -> None:
    """Two prompts that evict each other, twice; then `/metrics` says where they came from."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    options = {**SMALL, "num_gpu_blocks_override": 34, "port": port, "host": "127.0.0.1"}
    flags = []
    for name, value in options.items():
        flags.append(f"--{name.replace('_', '-')}")
        if value is not True:
            flags.append(str(value))
    storage = {
        "KVTIER_HOST_BYTES": "1048576",
        "KVTIER_DISK": str(tmp_path / "store"),
        "KVTIER_DISK_BYTES": "67108864",
    }
    with (tmp_path / "log").open("wb") as log:
        server = subprocess.Popen(
            [str(ROOT / "examples" / "vllm_serve.sh"), str(models / "full"), *flags],
            env=environment(tmp_path) | storage,
            stdout=log,
            stderr=subprocess.STDOUT,
        )
        try:
            wait_for(f"http://127.0.0.1:{port}/health", server, tmp_path / "log")
            prompts = [letter * 900 for letter in "ab"]
            answers = [complete(port, models / "full", prompt) for prompt in prompts * 2]
            assert answers[:2] == answers[2:]
            metrics = fetch(f"http://127.0.0.1:{port}/metrics")
        finally:
            server.send_signal(signal.SIGINT)
            server.wait(60)
    found = re.search(r'kvtier:tier_used_bytes\{.*tier="1:file"\} (\S+)', metrics)
    assert found is not None
    assert float(found[1]) > 0
    found = re.search(r"kvtier:loaded_chunks_total\{.*\} (\S+)", metrics)
    assert found is not None
    assert float(found[1]) >= 20


def environment(directory: Path) -> dict[str, str]:
    """`vllm serve` asks for the version of a distribution `vllm`, and takes from it that this is
    the CPU build; that one has another name."""
    version = f"{vllm.__version__}+cpu"
    metadata = directory / "named" / f"vllm-{version}.dist-info" / "METADATA"
    metadata.parent.mkdir(parents=True, exist_ok=True)
    metadata.write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n")
    paths = [str(metadata.parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(paths),
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "HF_HUB_OFFLINE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_NO_USAGE_STATS": "1",
    }


def wait_for(url: str, server: subprocess.Popen[bytes], log: Path) -> None:
    """A server says that it is there by answering."""
    end = time.monotonic() + START_SECONDS
    while time.monotonic() < end:
        if server.poll() is not None:
            break
        try:
            fetch(url)
        except OSError:
            time.sleep(0.5)
        else:
            return
    pytest.fail(log.read_text()[-4000:], pytrace=False)


def fetch(url: str, body: Any = None) -> str:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})  # noqa: S310
    with urllib.request.urlopen(request, timeout=60) as answer:  # noqa: S310
        return str(answer.read().decode())


def complete(port: int, model: Path, prompt: str) -> str:
    body = {"model": str(model), "prompt": prompt, "max_tokens": 8, "temperature": 0.0}
    answer = json.loads(fetch(f"http://127.0.0.1:{port}/v1/completions", body))
    return str(answer["choices"][0]["text"])
