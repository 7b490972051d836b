"""The plug-in in vLLM's real CPU engine: what comes out is what comes out without it.

Each engine has room for little more than one prompt, so every prompt evicts the one before it, and
what a later round finds, it finds in kvtier's tiers. Tokens and log-probabilities are compared:
on the CPU a prefix that was loaded and one that was computed give the same bits.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.vllm.conftest import BLOCK, Run, one_by_one, prompts, spec

pytestmark = pytest.mark.timeout(600)

PROMPTS = prompts(500, 520, 540, 513)
Computed = Callable[[list[list[int]]], list[Any]]


def file_tier(path: Path) -> dict[str, Any]:
    """One that is never too slow: a busy machine must not cost it a store."""
    limits = {"max_queued_bytes": 1 << 26, "high_water_s_per_mib": 60.0}
    return {"type": "file", "path": str(path), "capacity_bytes": 1 << 26, **limits}


def full_chunks(tokens: int, blocks_per_chunk: int) -> int:
    """Tokens in whole chunks; the last token of a prompt is always computed."""
    return (tokens - 1) // (BLOCK * blocks_per_chunk) * BLOCK * blocks_per_chunk


@pytest.mark.parametrize(("blocks_per_chunk", "processes"), [(1, True), (2, False), (4, False)])
def test_prefixes_return_from_host(
    run: Run, computed: Computed, blocks_per_chunk: int, processes: bool
) -> None:
    """Evicted from the GPU, they come back; after a reset they do not, and then do again."""
    acts = [
        *one_by_one(*PROMPTS, *PROMPTS),
        {"act": "reset"},
        *one_by_one(*PROMPTS, *PROMPTS),
    ]
    outcome = run(acts, spec(blocks_per_chunk=blocks_per_chunk), processes=processes)
    assert outcome.texts == computed(PROMPTS) * 4
    returned = [full_chunks(len(prompt), blocks_per_chunk) for prompt in PROMPTS]
    assert outcome.cached == ([0] * len(PROMPTS) + returned) * 2
    chunks = sum(returned) // (BLOCK * blocks_per_chunk)
    assert outcome.metrics["kvtier:loaded_chunks_total"] == 2 * chunks
    assert outcome.metrics["vllm:kv_offload_load_bytes_total"] > 0


def test_prefixes_return_from_disk_also_after_a_restart(
    run: Run, computed: Computed, tmp_path: Path
) -> None:
    """Host memory holds one prompt. The next engine finds them all; damaged ones are computed."""
    connector = spec(cpu_bytes_to_use=1 << 20, secondary_tiers=[file_tier(tmp_path)])
    returned = [full_chunks(len(prompt), 1) for prompt in PROMPTS]
    stored = {"act": "stored", "path": str(tmp_path), "chunks": sum(returned) // BLOCK}
    first = run([*one_by_one(*PROMPTS), stored, *one_by_one(*PROMPTS)], connector)
    assert first.texts == computed(PROMPTS) * 2
    assert first.cached == [0] * len(PROMPTS) + returned
    assert first.metrics["vllm:kv_offload_tiering_read_bytes_total{1:file}"] > 0

    damaged = [*one_by_one(*PROMPTS), {"act": "damage", "path": str(tmp_path)}]
    acts = [*damaged, *one_by_one(*PROMPTS), stored, *one_by_one(*PROMPTS)]
    second = run(acts, connector, processes=True)
    assert second.texts == computed(PROMPTS) * 3
    assert second.cached[:4] == returned
    assert second.results[4] > 0
    assert second.metrics["kvtier:tier_corrupt_chunks_total{1:file}"] > 0
    # What was damaged is stored anew.
    assert second.cached[8:] == returned


@pytest.mark.parametrize(
    ("faults", "figure"),
    [
        ({"full": 1.0}, "vllm:kv_offload_tiering_cascade_job_failures_total{1:bad}"),
        ({"hang": 1.0}, "kvtier:tier_jobs_overdue_total{1:bad}"),
        ({"corrupt": 1.0}, "kvtier:tier_corrupt_chunks_total{1:bad}"),
    ],
)
def test_a_bad_disk_costs_hits_and_nothing_else(
    run: Run, computed: Computed, tmp_path: Path, faults: dict[str, float], figure: str
) -> None:
    """The engine goes on, its answers are the same, and the figures tell."""
    bad = {
        "type": "faulty",
        "name": "bad",
        "inner": file_tier(tmp_path),
        "faults": faults,
        "load_deadline_s": 0.2,
        "store_deadline_s": 0.2,
    }
    connector = spec(cpu_bytes_to_use=1 << 20, secondary_tiers=[bad], shutdown_drain_s=0)
    acts = [*one_by_one(*PROMPTS), {"act": "settle", "seconds": 0.5}, *one_by_one(*PROMPTS)]
    outcome = run(acts, connector)
    assert outcome.texts == computed(PROMPTS) * 2
    assert outcome.metrics[figure] > 0


@pytest.mark.parametrize(
    ("model", "connector", "engine", "chunks"),
    [
        ("window", {"blocks_per_chunk": 2}, {"num_gpu_blocks_override": 64}, 35),
        ("recurrent", {}, {"num_gpu_blocks_override": 17, "enable_prefix_caching": True}, 16),
        ("full", {"blocks_per_chunk": 2}, {"tensor_parallel_size": 2, "processes": True}, 31),
        (
            "full",
            {"canonical_layout": True},
            {"tensor_parallel_size": 2, "processes": True},
            63,
        ),
    ],
    ids=["sliding window", "recurrent", "two ranks", "two ranks, canonical"],
)
def test_other_layouts_return_from_disk(
    run: Run,
    tmp_path: Path,
    model: str,
    connector: dict[str, Any],
    engine: dict[str, Any],
    chunks: int,
) -> None:
    """The second and third round load what the first one computed, as so many chunks."""
    settings = spec(cpu_bytes_to_use=700_000, secondary_tiers=[file_tier(tmp_path)], **connector)
    stored = {"act": "stored", "path": str(tmp_path), "chunks": chunks}
    acts = [*one_by_one(*PROMPTS), stored, *one_by_one(*PROMPTS, *PROMPTS)]
    outcome = run(acts, settings, model=model, **engine)
    assert outcome.cached[:4] == [0] * 4
    assert all(cached >= 384 for cached in outcome.cached[4:])
    assert outcome.texts[4:] == outcome.texts[:4] * 2
    assert outcome.metrics["kvtier:loaded_chunks_total"] > 0
    assert outcome.metrics["vllm:kv_offload_tiering_read_bytes_total{1:file}"] > 0


def test_salts_share_nothing(run: Run, tmp_path: Path) -> None:
    """One prompt under two salts: each finds its own, neither the other's."""
    connector = spec(secondary_tiers=[file_tier(tmp_path)])
    mine, other = PROMPTS[:2]
    acts = [
        *one_by_one(mine, salts=["a"]),
        *one_by_one(other),
        *one_by_one(mine, salts=["b"]),
        *one_by_one(other),
        *one_by_one(mine, salts=["a"]),
        *one_by_one(mine),
    ]
    outcome = run(acts, connector)
    assert [cached > 0 for cached in outcome.cached] == [False, False, False, True, True, False]


def test_preemption_and_aborts_under_load(run: Run, computed: Computed, tmp_path: Path) -> None:
    """Requests that do not fit together, and requests that are gone while their chunks come."""
    connector = spec(cpu_bytes_to_use=1 << 20, secondary_tiers=[file_tier(tmp_path)])
    crowd = prompts(200, 210, 220, 230, 190, 180, seed=2)
    long = {"max_tokens": 96}
    acts = [
        *one_by_one(*PROMPTS),
        *({"act": "abort", "prompts": PROMPTS, "steps": steps} for steps in (1, 2, 3, 5)),
        {"act": "generate", "prompts": crowd, "params": long},
        *one_by_one(*PROMPTS),
    ]
    outcome = run(acts, connector)
    assert outcome.metrics["vllm:num_preemptions_total"] > 0
    assert outcome.texts[:4] + outcome.texts[5:] == computed(PROMPTS) * 2
    assert all(request["reason"] == "length" for request in outcome.results[8])
