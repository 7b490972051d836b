"""What a Prometheus server reads, through vLLM's own logger of statistics."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import prometheus_client
import pytest
from prometheus_client.parser import text_string_to_metric_families
from tests.vllm.calls import SLOT, Host, keys_of
from tests.vllm.conftest import quiet_imports, spec

import kvtier

with quiet_imports():
    from vllm.config import KVTransferConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorProm
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import (
        OffloadingConnectorStats,
    )

    from kvtier.integrations.vllm import KVTierOffloadingSpec
    from kvtier.integrations.vllm.manager import KVTierOffloadingManager
    from kvtier.integrations.vllm.metrics import FIGURES, metric_definitions
    from kvtier.integrations.vllm.versions import running_version

Series = dict[tuple[str, str], float]
"""Values by name and tier; the tier is empty where there is no such label."""


@pytest.fixture
def host() -> Iterator[Host]:
    tiers = [
        {"type": "memory", "capacity_bytes": 6 * SLOT, "load_share": 1.0},
        {"type": "memory", "name": "second", "capacity_bytes": 64 * SLOT, "load_share": 1.0},
    ]
    region = kvtier.Region(16, SLOT)
    inner = kvtier.Manager(region, tiers, store_threshold=2)
    manager = KVTierOffloadingManager(inner)
    drain: Any = lambda: inner.drain(30)  # noqa: E731
    yield Host(manager, memoryview(region).cast("B"), drain)
    manager.shutdown()


@pytest.fixture
def logger() -> Iterator[KVConnectorProm]:
    """vLLM's, as its front end makes it; what it registers is taken back."""
    before = set(prometheus_client.REGISTRY._collector_to_names)
    transfer = KVTransferConfig(
        kv_connector="OffloadingConnector", kv_role="kv_both", kv_connector_extra_config=spec()
    )
    yield KVConnectorProm(SimpleNamespace(kv_transfer_config=transfer), ["engine"], {0: ["0"]})
    for collector in set(prometheus_client.REGISTRY._collector_to_names) - before:
        prometheus_client.REGISTRY.unregister(collector)


def scraped() -> Series:
    """`/metrics`, of ours and of vLLM's offloading."""
    text = prometheus_client.generate_latest().decode()
    return {
        (sample.name, sample.labels.get("tier", "")): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name.startswith(("kvtier:", "vllm:kv_offload"))
    }


def test_what_happened_can_be_read_by_name_and_tier(host: Host, logger: KVConnectorProm) -> None:
    """Counters add up over steps, gauges are the last, and tiers are told apart."""
    keys = keys_of(10)
    for _ in range(2):  # Offered twice, as `store_threshold` asks.
        host.store(keys)
        logger.observe(host.manager.get_stats().data)
    host.forget()
    host.load(keys)
    logger.observe(host.manager.get_stats().data)
    read = scraped()
    tiers = host.manager.manager.stats()["tiers"]
    assert read["vllm:kv_offload_stores_skipped_total", ""] == 10
    assert read["vllm:kv_offload_cpu_allocation_size_sum", ""] == 10
    assert read["kvtier:stored_chunks_total", ""] == read["kvtier:loaded_chunks_total", ""] == 10
    assert read["kvtier:primary_slots", ""] == 16
    assert 0 < tiers["memory"]["loads"] <= 6
    for number, name in ((1, "memory"), (2, "second")):
        loads = read["kvtier:tier_loaded_chunks_total", f"{number}:{name}"]
        assert loads == tiers[name]["loads"]
        of_tier = f"{number}:{name}"
        assert read["vllm:kv_offload_tiering_read_bytes_total", of_tier] == loads * SLOT
        assert read["vllm:kv_offload_tiering_write_bytes_total", of_tier] == 10 * SLOT
        assert read["kvtier:tier_used_bytes", of_tier] == tiers[name]["used_bytes"]
    assert read["kvtier:tier_evictions_total", "1:memory"] == 4
    assert read["vllm:kv_offload_tiering_chunk_queries_total", "0:primary"] > 0


def test_nothing_is_sent_twice(host: Host) -> None:
    host.store(keys_of(4))
    host.store(keys_of(4))
    first = host.manager.get_stats().data["data"]
    assert first["kvtier:stored_chunks"] == {(): 4}
    assert host.manager.get_stats() is None
    host.load(keys_of(1))
    again = host.manager.get_stats().data["data"]
    assert "kvtier:stored_chunks" not in again
    assert again["kvtier:loaded_chunks"] == {(): 1}


def test_every_figure_is_declared_and_read_somewhere(host: Host) -> None:
    """All names are taken from a snapshot of a manager that did something of everything."""
    declared = metric_definitions()
    assert len(declared) == len(FIGURES) + 1
    stats = host.manager.manager.stats()
    for figure in FIGURES:
        assert figure.host or figure.tier
        assert declared[figure.name].labelnames == figure.labels
        if figure.host:
            figure.host(stats["primary"])
        if figure.tier:
            figure.tier(stats["tiers"]["second"])


@pytest.mark.skipif(running_version() == "0.32", reason="0.32 has no config_info")
def test_settings_are_shown(logger: KVConnectorProm) -> None:
    names = KVTierOffloadingSpec.config_info_keys({})
    stats: Any = OffloadingConnectorStats()
    stats.set_info([dict.fromkeys(names, "x") | {"kvtier_policy": "gittins"}])
    logger.observe(stats.data)
    text = prometheus_client.generate_latest().decode()
    [line] = [line for line in text.splitlines() if line.startswith("vllm:kv_offload_config_info{")]
    assert 'kvtier_policy="gittins"' in line
