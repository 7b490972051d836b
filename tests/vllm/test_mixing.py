"""Tiers of either house under the other's manager: bytes come back, or nothing does."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest
from tests.vllm.calls import SLOT, Host, begin, chunk_of, keys_of, offloading_config
from tests.vllm.conftest import quiet_imports

import kvtier
from kvtier.errors import ConfigError, StoreIdentityError
from kvtier.tiers import JobResult, TierContext, TierJob

with quiet_imports():
    from vllm.v1.kv_offload.base import LookupResult, Medium
    from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

    from kvtier.integrations.vllm import KVTierOffloadingSpec
    from kvtier.integrations.vllm.layout import slot_layout
    from kvtier.integrations.vllm.meeting import join_as_worker
    from kvtier.integrations.vllm.tiers import KVTierSecondaryTier

FACTS = {"hash": "sha256", "revision": None, "batches_in_flight": 1}
PATIENT = {"lookup_deadline_s": 30, "load_deadline_s": 30}
_numbers = itertools.count()


@contextmanager
def our_host(slots: int, *tiers: dict[str, Any], **config: Any) -> Iterator[Host]:
    """kvtier's spec, as an engine makes it."""
    name = f"mixing {next(_numbers)}"
    made = offloading_config(slots, name, secondary_tiers=list(tiers), **config)
    region = join_as_worker(name, slot_layout(made, slots * SLOT), FACTS, 0)
    with quiet_imports():
        manager = KVTierOffloadingSpec(made).get_manager()
    assert region.nbytes == manager.manager.region.nbytes
    inner = manager.manager
    try:
        yield Host(manager, memoryview(inner.region).cast("B"), lambda: assert_drained(inner))
    finally:
        manager.shutdown()


def assert_drained(manager: kvtier.Manager) -> None:
    assert manager.drain(30)
    manager.validate()


def their_manager(slots: int, *tiers: dict[str, Any], **config: Any) -> Any:
    """vLLM's `TieringOffloadingSpec`, as an engine makes it."""
    ours = {"type": "KVTierSecondaryTier", "module_path": "kvtier.integrations.vllm.tiers"}
    given = [{**ours, "tier": tier} for tier in tiers]
    made = offloading_config(slots, f"mixing {next(_numbers)}", secondary_tiers=given, **config)
    with quiet_imports():
        return TieringOffloadingSpec(made).get_manager()


@contextmanager
def their_host(slots: int, *tiers: dict[str, Any], **config: Any) -> Iterator[Host]:
    manager = their_manager(slots, *tiers, **config)
    memory = manager.primary_tier.get_kv_memoryview().cast("B")

    def settle() -> None:
        for tier in manager.secondary_tiers:
            tier.drain_jobs()

    try:
        yield Host(manager, memory, settle)
    finally:
        memory.release()
        manager.shutdown()


def disk(path: Path, chunks: int = 64) -> dict[str, Any]:
    return {"type": "file", "path": str(path), "capacity_bytes": chunks * 2 * SLOT, **PATIENT}


def fs(path: Path, **fields: Any) -> dict[str, Any]:
    return {"type": "vllm", "tier": {"type": "fs", "root_dir": str(path)}, **PATIENT, **fields}


def flip(path: Path) -> None:
    """Damages every page of the files below a directory."""
    for file in (file for file in path.rglob("*") if file.suffix in (".bin", "")):
        if file.is_file() and file.stat().st_size >= SLOT:
            data = bytearray(file.read_bytes())
            for page in range(0, len(data), SLOT):
                data[page] ^= 1
            file.write_bytes(data)


# vLLM's tiers under kvtier's manager.


def test_chunks_come_back_from_a_tier_of_vllm(tmp_path: Path) -> None:
    keys = keys_of(12)
    with our_host(16, fs(tmp_path)) as host:
        host.store(keys)
        host.forget()
        chunks, sources = host.load(keys)
        assert chunks == [chunk_of(key) for key in keys]
        assert sources == ["disk"] * 12
        assert host.load(keys)[1] == ["host"] * 12
        tier = host.manager.manager.stats()["tiers"]["fs"]
        assert (tier["stores"], tier["loads"], tier["medium"]) == (12, 12, "file")
        owners = {event.ownership for event in host.manager.take_events()}
        assert owners == {None, "fs"}
        assert "fs" in host.manager.config_info()[0]["kvtier_tiers"]


def test_a_prefix_that_a_tier_of_vllm_has_in_part_ends_there(tmp_path: Path) -> None:
    keys = keys_of(12)
    with our_host(16, fs(tmp_path)) as host:
        host.store(keys[:5])
        host.forget()
        assert host.load(keys)[0] == [chunk_of(key) for key in keys[:5]]


def test_both_houses_behind_one_manager_and_each_hit_has_its_source(tmp_path: Path) -> None:
    """What the first tier lost comes from the second."""
    keys = keys_of(12)
    tiers = ({"type": "memory", "capacity_bytes": 4 * SLOT, **PATIENT}, fs(tmp_path))
    with our_host(16, *tiers) as host:
        host.store(keys)
        host.forget()
        chunks, sources = host.load(keys)
        assert chunks == [chunk_of(key) for key in keys]
        first = host.manager.manager.stats()["tiers"]["memory"]["loads"]
        assert 0 < first <= 4
        assert (sources.count("host"), sources.count("disk")) == (first, 12 - first)


@pytest.mark.parametrize("serve_unverified", [False, True])
def test_a_chunk_that_was_changed_on_disk_is_not_served(
    tmp_path: Path, serve_unverified: bool
) -> None:
    keys = keys_of(3)
    with our_host(16, fs(tmp_path, serve_unverified=serve_unverified)) as host:
        host.store(keys)
        host.forget()
        flip(tmp_path)
        assert host.load(keys)[0] == []
        tier = host.manager.manager.stats()["tiers"]["fs"]
        assert tier["load_failures"]["corrupt"] > 0
        # What is stored again stays where it was, and is not asked for.
        host.store(keys)
        host.forget()
        asked = tier["loads"] + sum(tier["load_failures"].values())
        assert host.load(keys)[0] == []
        tier = host.manager.manager.stats()["tiers"]["fs"]
        assert tier["loads"] + sum(tier["load_failures"].values()) == asked


def test_a_chunk_that_was_cut_short_is_a_miss(tmp_path: Path) -> None:
    keys = keys_of(2)
    with our_host(16, fs(tmp_path)) as host:
        host.store(keys)
        host.forget()
        for file in tmp_path.rglob("*.bin"):
            file.write_bytes(file.read_bytes()[: SLOT // 2])
        assert host.load(keys)[0] == []
        assert host.manager.manager.stats()["tiers"]["fs"]["load_failures"]["io"] > 0


def test_a_tier_that_claims_to_have_loaded_is_found_out() -> None:
    """vLLM's `example` keeps no bytes at all."""
    keys = keys_of(3, prefix=1)
    with our_host(16, {"type": "vllm", "tier": {"type": "example"}, **PATIENT}) as host:
        host.store(keys)
        host.forget()
        host.memory[:] = bytes(len(host.memory))
        assert host.load(keys)[0] == []
        assert host.manager.manager.stats()["tiers"]["example"]["load_failures"]["corrupt"] > 0


@pytest.mark.parametrize(("serve_unverified", "found"), [(False, 0), (True, 3)])
def test_chunks_of_an_earlier_run_have_no_checksum(
    tmp_path: Path, serve_unverified: bool, found: int
) -> None:
    keys = keys_of(3)
    for _ in range(2):
        with our_host(16, fs(tmp_path, serve_unverified=serve_unverified)) as host:
            chunks, _ = host.load(keys)
            host.store(keys)
    assert chunks == [chunk_of(key) for key in keys[:found]]


def test_tiers_of_vllm_never_serve_another_namespace(tmp_path: Path) -> None:
    keys = keys_of(3)
    tier = fs(tmp_path, serve_unverified=True)
    with our_host(16, tier) as host:
        host.store(keys)
    with our_host(16, tier, namespace="other weights") as host:
        assert host.load(keys)[0] == []


@pytest.mark.parametrize(
    ("tier", "message"),
    [
        ({}, r"tier 0 \(vllm\): tier is None"),
        ({"tier": {"root_dir": "/"}}, "with its `type`"),
        ({"tier": {"type": "tape"}}, "Unknown secondary tier type: 'tape'"),
        ({"tier": {"type": "fs"}}, "tier 'fs': vLLM refused .*root_dir"),
        ({"tier": {"type": "fs", "root_dir": "/", "backpressure": {}}}, "high_water_s_per_mib"),
        ({"tier": {"type": "p2p"}}, "'p2p' serves other engines"),
        ({"tier": {"type": "fs", "root_dir": "/"}, "spec": 1}, "unknown field `spec`"),
        ({"tier": {"type": "fs", "root_dir": "/"}, "trust": 1}, "unknown field `trust`"),
    ],
)
def test_a_tier_of_vllm_that_can_not_work_is_refused(tier: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message), our_host(16, {"type": "vllm", **tier}):
        pass


# kvtier's tiers under vLLM's manager.


@pytest.mark.parametrize("kind", ["memory", "file", "tests.vllm.test_mixing:Held"])
def test_chunks_come_back_from_a_tier_of_kvtier(tmp_path: Path, kind: str) -> None:
    keys = keys_of(12)
    settings: dict[str, dict[str, Any]] = {
        "memory": {"capacity_bytes": 64 * SLOT},
        "file": {"capacity_bytes": 128 * SLOT, "path": str(tmp_path)},
    }
    with their_host(16, {"type": kind, **settings.get(kind, {}), **PATIENT}) as host:
        host.store(keys)
        host.forget()
        chunks, sources = host.load(keys)
        assert chunks == [chunk_of(key) for key in keys]
        source = {"memory": "host", "file": "disk"}.get(kind, "external_unspecified")
        assert sources == [source] * 12
        assert any(event.ownership == kind for event in host.manager.take_events())


def test_a_restarted_engine_finds_what_an_old_one_stored(tmp_path: Path) -> None:
    keys = keys_of(5)
    with their_host(16, disk(tmp_path)) as host:
        host.store(keys)
    with their_host(16, disk(tmp_path)) as host:
        assert host.load(keys)[0] == [chunk_of(key) for key in keys]
    with (
        pytest.raises(StoreIdentityError, match="other"),
        their_host(16, disk(tmp_path), model="other"),
    ):
        pass


def test_a_damaged_chunk_fails_its_load_and_is_not_said_to_be_there(tmp_path: Path) -> None:
    keys = keys_of(3)
    with their_host(16, disk(tmp_path)) as host:
        host.store(keys)
    flip(tmp_path)
    with their_host(16, disk(tmp_path)) as host:
        # A copy is found out when it is read: each by itself, since a prefix ends at the first.
        assert [host.load([key])[0] for key in keys] == [[]] * 3
        context = begin(host.manager, keys)
        assert {host.manager.lookup(key, context) for key in keys} == {LookupResult.MISS}
        host.store(keys)
        host.forget()
        assert host.load(keys)[0] == [chunk_of(key) for key in keys]


def test_a_full_tier_evicts_and_says_so(tmp_path: Path) -> None:
    del tmp_path
    tier = {"type": "memory", "capacity_bytes": 4 * SLOT, **PATIENT}
    with their_host(16, tier) as host:
        host.store(keys_of(4))
        host.store(keys_of(4, prefix=1))
        events = list(host.manager.take_events())
        removed = [event for event in events if event.removed and event.ownership == "memory"]
        assert sorted(key for event in removed for key in event.keys) == sorted(keys_of(4))
        assert {event.medium for event in removed} == {Medium.CPU}


def test_keys_of_another_hash_are_misses_and_the_engine_goes_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with their_host(16, {"type": "memory", "capacity_bytes": 64 * SLOT}) as host:
        short = [key[-20:] for key in keys_of(2)]
        host.store(short)
        host.forget()
        assert host.load(short)[0] == []
    assert "--prefix-caching-hash-algo" in caplog.text


@pytest.mark.parametrize(
    ("tier", "message"),
    [
        ({"type": "file", "capacity_bytes": 1 << 20}, "missing field `path`"),
        ({"type": "memory", "capacity_bytes": 1 << 20, "offload": "request"}, "leave it out"),
        ({"type": "tape"}, "unknown type"),
    ],
)
def test_a_tier_of_kvtier_that_can_not_work_is_refused(tier: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message), their_host(16, tier):
        pass


def test_memory_in_broken_pages_is_refused() -> None:
    with pytest.raises(ConfigError, match="whole pages"):
        KVTierSecondaryTier(
            KVTierOffloadingSpec(offloading_config(16, "broken")),
            memoryview(bytearray(4 * 1000)).cast("B", (4, 1000)),
            "KVTierSecondaryTier",
            {"type": "memory", "capacity_bytes": 1 << 20},
        )


def test_memory_is_kept_for_a_job_that_does_not_come_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """vLLM is told, by an error, and keeps its memory too."""
    taken: SimpleQueue[TierJob] = SimpleQueue()
    monkeypatch.setattr(Held, "submit_store", lambda _, job: taken.put(job))
    manager = their_manager(16, {"type": "tests.vllm.test_mixing:Held"})
    keys = keys_of(1)
    context = begin(manager, keys)
    manager.prepare_store(keys, context)
    manager.complete_store(set(keys), context)
    job = taken.get(timeout=30)
    with pytest.raises(kvtier.errors.TierError, match="1 jobs did not come back"):
        manager.shutdown()
    with pytest.raises(BufferError):
        manager.primary_tier.shutdown()
    del job
    manager.shutdown()


class Held(kvtier.SecondaryTier):
    """A dict of chunks."""

    def __init__(self, context: TierContext) -> None:
        super().__init__(context)
        self.kept: dict[bytes, tuple[bytes, int]] = {}
        self.results: list[JobResult] = []

    def lookup(self, keys: Sequence[bytes]) -> list[int]:
        return [kvtier.HIT if key in self.kept else kvtier.MISS for key in keys]

    def submit_store(self, job: TierJob) -> None:
        chunks = map(bytes, job.chunks)
        self.kept |= zip(job.keys, zip(chunks, job.checksums, strict=True), strict=True)
        self.results.append(JobResult(job.id, done=job.keys))

    def submit_load(self, job: TierJob) -> None:
        for key, chunk in zip(job.keys, job.chunks, strict=True):
            chunk[:] = self.kept[key][0]
        self.results.append(JobResult(job.id, done={key: self.kept[key][1] for key in job.keys}))

    def finished(self) -> list[JobResult]:
        results, self.results = self.results, []
        return results
