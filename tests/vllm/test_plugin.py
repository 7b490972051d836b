"""What happens before the first request: versions, settings, identity, the meeting of processes."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.vllm.conftest import quiet_imports

import kvtier
from kvtier.errors import ConfigError, TransferError

with quiet_imports():
    from vllm.v1.kv_offload.base import (
        CanonicalKVCacheRef,
        CanonicalKVCaches,
        CanonicalKVCacheTensor,
    )

    from kvtier.integrations.vllm import KVTierOffloadingSpec
    from kvtier.integrations.vllm.identity import namespace_of
    from kvtier.integrations.vllm.layout import SlotLayout
    from kvtier.integrations.vllm.meeting import (
        join_as_scheduler,
        join_as_worker,
        note_path,
    )
    from kvtier.integrations.vllm.settings import parse_settings
    from kvtier.integrations.vllm.versions import SUPPORTED, running_version

LAYOUT = SlotLayout(slots=4, slot_bytes=4096, blocks_per_chunk=1)
FACTS = {"hash": "sha256", "revision": None, "batches_in_flight": 1}


@pytest.fixture
def engine_id(request: pytest.FixtureRequest) -> Iterator[str]:
    name = f"test {request.node.name}"
    yield name
    note_path(name).unlink(missing_ok=True)


def test_importing_kvtier_imports_no_engine() -> None:
    code = "import kvtier, kvtier.torch, sys; sys.exit('vllm' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_another_version_is_refused_with_the_list() -> None:
    assert [running_version(f"{version}.7+cpu") for version in SUPPORTED] == list(SUPPORTED)
    with pytest.raises(ConfigError, match=r"vLLM 0\.31\.2 is not supported: .* 0\.32, 0\.33"):
        running_version("0.31.2")


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({}, "cpu_bytes_to_use is missing"),
        ({"cpu_bytes_to_use": "1G"}, "cpu_bytes_to_use is '1G'"),
        ({"cpu_bytes_to_use": True}, "cpu_bytes_to_use is True"),
        ({"cpu_bytes_to_use": 1, "evicton_policy": "lru"}, "unknown field 'evicton_policy'"),
        ({"cpu_bytes_to_use": 1, "eviction_policy": "mru"}, "eviction_policy is 'mru'"),
        ({"cpu_bytes_to_use": 1, "secondary_tiers": {}}, "must be a list of objects"),
        ({"cpu_bytes_to_use": 1, "namespace": 3}, "namespace is 3"),
        ({"cpu_bytes_to_use": 1, "shutdown_drain_s": -1}, "shutdown_drain_s is -1"),
    ],
)
def test_a_setting_that_can_not_work_is_named(extra: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_settings(extra)


def test_numbers_of_json_are_taken() -> None:
    settings = parse_settings({"cpu_bytes_to_use": 1e9, "store_threshold": 0})
    assert settings.host_bytes == 10**9
    assert settings.store_threshold == 1


def test_workers_and_scheduler_share_one_region(engine_id: str) -> None:
    """The scheduler is last and takes the note away; the region lives on."""
    first = join_as_worker(engine_id, LAYOUT, FACTS, 0)
    assert note_path(engine_id).stat().st_mode & 0o777 == 0o600
    second = join_as_worker(engine_id, LAYOUT, FACTS, 0)
    region, facts = join_as_scheduler(engine_id, LAYOUT)
    assert facts == FACTS
    assert not note_path(engine_id).exists()
    memoryview(first)[2, 7] = 42
    del first
    assert memoryview(second)[2, 7] == memoryview(region)[2, 7] == 42


def test_workers_in_other_processes_share_it_too(engine_id: str) -> None:
    region = join_as_worker(engine_id, LAYOUT, FACTS, 0)
    code = f"""
import json, sys, warnings
warnings.simplefilter("ignore")
from kvtier.integrations.vllm.layout import SlotLayout
from kvtier.integrations.vllm.meeting import join_as_worker
region = join_as_worker({engine_id!r}, {LAYOUT!r}, json.loads({json.dumps(FACTS)!r}), 0)
memoryview(region)[3, 1] = 7
"""
    subprocess.run([sys.executable, "-c", code], check=True)
    assert memoryview(region)[3, 1] == 7


def test_a_note_of_a_dead_engine_is_replaced(engine_id: str) -> None:
    region = join_as_worker(engine_id, LAYOUT, FACTS, 0)
    name = region.name
    del region
    fresh = join_as_worker(engine_id, LAYOUT, FACTS, 0)
    assert memoryview(fresh).nbytes == LAYOUT.slots * LAYOUT.slot_bytes
    assert name is not None


def test_workers_that_differ_are_refused(engine_id: str) -> None:
    region = join_as_worker(engine_id, LAYOUT, FACTS, 0)
    with pytest.raises(ConfigError, match="give every engine of this machine an engine_id"):
        join_as_worker(engine_id, LAYOUT, {**FACTS, "revision": "other"}, 0)
    assert region.slots == LAYOUT.slots


def test_a_scheduler_without_workers_is_refused(engine_id: str) -> None:
    with pytest.raises(ConfigError, match="must start after its workers"):
        join_as_scheduler(engine_id, LAYOUT)
    assert not note_path(engine_id).exists()


def config(**changes: Any) -> Any:
    fields: dict[str, Any] = {
        "model": SimpleNamespace(name="model", dtype="bfloat16"),
        "kv_cache_layout": "LBHNC",
        "canonical_layout": False,
        "replicated_layout": False,
        "groups": [SimpleNamespace(tokens_per_block=16, layer_names=("a", "b"))],
        "cache": SimpleNamespace(tokens_per_hash=16, blocks_per_chunk=1),
        "worker_kv_bytes_per_block": 4096,
        "parallel": SimpleNamespace(
            world_size=1, tp_size=1, pp_size=1, pcp_size=1, dcp_size=1,
            is_parallelism_agnostic=False,
        ),
    }  # fmt: skip
    return SimpleNamespace(**(fields | changes))


@pytest.mark.parametrize(
    ("changes", "facts", "extra"),
    [
        ({"model": SimpleNamespace(name="other", dtype="bfloat16")}, {}, ""),
        ({"model": SimpleNamespace(name="model", dtype="float16")}, {}, ""),
        ({"kv_cache_layout": "BLHNC"}, {}, ""),
        ({"cache": SimpleNamespace(tokens_per_hash=16, blocks_per_chunk=2)}, {}, ""),
        ({"groups": [SimpleNamespace(tokens_per_block=16, layer_names=("a",))]}, {}, ""),
        ({}, {"revision": "v2"}, ""),
        ({}, {"architecture": "rope scaled"}, ""),
        ({}, {"hash": "sha256_cbor"}, ""),
        ({}, {}, "weights of tuesday"),
    ],
)
def test_whatever_changes_the_bytes_changes_the_namespace(
    changes: dict[str, Any], facts: dict[str, Any], extra: str
) -> None:
    """And a store of the one is refused to the other, with both identities."""
    base = namespace_of(config(), FACTS, "")
    assert namespace_of(config(**changes), FACTS | facts, extra) != base
    assert namespace_of(config(), FACTS | {"batches_in_flight": 2}, "") == base


def test_the_seed_of_the_hash_is_in_the_namespace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    plain = namespace_of(config(), FACTS, "")
    random = namespace_of(config(), {**FACTS, "hash": "xxhash"}, "")
    assert json.loads(random)["hash_seed"] == "random"
    monkeypatch.setenv("PYTHONHASHSEED", "7")
    assert namespace_of(config(), FACTS, "") != plain
    assert json.loads(namespace_of(config(), {**FACTS, "hash": "xxhash"}, ""))["hash_seed"] != (
        "random"
    )


def test_canonical_stores_are_the_same_for_all_parallel_sizes() -> None:
    def of(ranks: int, *, agnostic: bool) -> str:
        parallel = SimpleNamespace(
            world_size=ranks, tp_size=ranks, pp_size=1, pcp_size=1, dcp_size=1,
            is_parallelism_agnostic=agnostic,
        )  # fmt: skip
        changes = {"parallel": parallel, "worker_kv_bytes_per_block": 4096 // ranks}
        return namespace_of(config(**changes, canonical_layout=True), FACTS, "")

    assert of(1, agnostic=True) == of(2, agnostic=True)
    assert of(1, agnostic=False) != of(2, agnostic=False)


def test_stores_of_another_model_are_refused(tmp_path: Path) -> None:
    tier = {"type": "file", "path": str(tmp_path), "capacity_bytes": 1 << 20}
    region = kvtier.Region(4, 4096)
    kvtier.Manager(region, [tier], namespace=namespace_of(config(), FACTS, "")).shutdown()
    other = namespace_of(config(), FACTS | {"revision": "v2"}, "")
    with pytest.raises(kvtier.errors.StoreIdentityError, match="v2"):
        kvtier.Manager(region, [tier], namespace=other)


def test_another_device_is_refused_before_there_is_a_region(engine_id: str) -> None:
    config: Any = SimpleNamespace(
        engine_id=engine_id,
        extra_config={"cpu_bytes_to_use": 4096},
        enable_kv_cache_events=False,
        groups=(),
        worker_kv_bytes_per_block=8,
        cache=SimpleNamespace(blocks_per_chunk=1, tokens_per_hash=16),
        parallel=SimpleNamespace(rank=0, world_size=1),
        replicated_layout=False,
        canonical_layout=False,
    )
    rows = torch.zeros(4, 8, dtype=torch.int8, device="meta")
    caches = CanonicalKVCaches([CanonicalKVCacheTensor(rows, 8)], [[CanonicalKVCacheRef(0, 8)]])
    with pytest.raises(TransferError, match="KV caches on meta are not supported"):
        KVTierOffloadingSpec(config).get_worker(caches)
    assert not note_path(engine_id).exists()
