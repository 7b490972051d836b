"""The plug-in in vLLM's real CPU engine: what comes out is what comes out without it.

Each engine has room for little more than one prompt, so every prompt evicts the one before it, and
what a later round finds, it finds in kvtier's tiers. Tokens and log-probabilities are compared:
on the CPU a prefix that was loaded and one that was computed give the same bits.

An engine takes long to start, so one serves several scenarios where it can: `host`, `disk` and
`restarted` are runs that more than one test looks at.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from tests.vllm.conftest import BLOCK, Outcome, Run, one_by_one, prompts, spec

pytestmark = pytest.mark.timeout(900)

PROMPTS = prompts(500, 520, 540, 513)
SALTED, OTHER = prompts(500, 530, seed=3)
CROWD = prompts(200, 210, 220, 230, 190, 180, seed=2)
LONG = {"max_tokens": 96}


def file_tier(path: Path) -> dict[str, Any]:
    """One that is never too slow: a busy machine must not cost it a store."""
    limits = {"max_queued_bytes": 1 << 26, "high_water_s_per_mib": 60.0}
    return {"type": "file", "path": str(path), "capacity_bytes": 1 << 26, **limits}


def full_chunks(tokens: int, blocks_per_chunk: int = 1) -> int:
    """Tokens in whole chunks; the last token of a prompt is always computed."""
    return (tokens - 1) // (BLOCK * blocks_per_chunk) * BLOCK * blocks_per_chunk


RETURNED = [full_chunks(len(prompt)) for prompt in PROMPTS]
CHUNKS = sum(RETURNED) // BLOCK


@pytest.fixture(scope="module")
def computed(run: Run) -> list[Any]:
    """What the full-attention model answers to `PROMPTS` without a connector."""
    outcome = run(one_by_one("all", *PROMPTS), None, enable_prefix_caching=False)
    return outcome.answers("all")


@pytest.fixture(scope="module")
def host(run: Run) -> Outcome:
    """Host memory alone, with room for everything; in processes, as `vllm serve` has them."""
    acts = [
        *one_by_one("first", *PROMPTS),
        *one_by_one("again", *PROMPTS),
        {"act": "metrics", "label": "metrics"},
        {"act": "reset", "label": "reset"},
        *one_by_one("first after reset", *PROMPTS),
        *one_by_one("again after reset", *PROMPTS),
        *one_by_one("salt a", SALTED, salts=["a"]),
        *one_by_one("other", OTHER),
        *one_by_one("salt b", SALTED, salts=["b"]),
        *one_by_one("other", OTHER),
        *one_by_one("salt a again", SALTED, salts=["a"]),
        *one_by_one("other", OTHER),
        *one_by_one("no salt", SALTED),
    ]
    return run(acts, spec(), processes=True)


def test_prefixes_return_from_host(host: Outcome, computed: list[Any]) -> None:
    assert host.answers("first") == host.answers("again") == computed
    assert host.cached("first") == [0] * len(PROMPTS)
    assert host.cached("again") == RETURNED
    [metrics] = host.of("metrics")
    assert metrics["kvtier:loaded_chunks_total"] == CHUNKS
    assert metrics["vllm:kv_offload_load_bytes_total"] > 0


def test_a_reset_forgets_and_what_comes_after_it_returns(
    host: Outcome, computed: list[Any]
) -> None:
    assert host.of("reset") == [True]
    assert host.answers("first after reset") == host.answers("again after reset") == computed
    assert host.cached("first after reset") == [0] * len(PROMPTS)
    assert host.cached("again after reset") == RETURNED


def test_salts_share_nothing(host: Outcome) -> None:
    """One prompt under two salts and none: each finds its own, and no other's."""
    assert host.cached("salt a") == host.cached("salt b") == host.cached("no salt") == [0]
    assert host.cached("salt a again") == [full_chunks(len(SALTED))]
    assert host.cached("other") == [0, *[full_chunks(len(OTHER))] * 2]
    assert host.answers("salt a") == host.answers("salt b") == host.answers("no salt")
    assert host.answers("salt a again") == host.answers("salt a")


@pytest.mark.parametrize("blocks_per_chunk", [2, 4])
def test_chunks_of_several_blocks_return_from_host(
    run: Run, computed: list[Any], blocks_per_chunk: int
) -> None:
    acts = [*one_by_one("first", *PROMPTS), *one_by_one("again", *PROMPTS)]
    outcome = run(acts, spec(blocks_per_chunk=blocks_per_chunk))
    assert outcome.answers("first") == outcome.answers("again") == computed
    assert outcome.cached("first") == [0] * len(PROMPTS)
    returned = [full_chunks(len(prompt), blocks_per_chunk) for prompt in PROMPTS]
    assert outcome.cached("again") == returned
    chunks = sum(returned) // (BLOCK * blocks_per_chunk)
    assert outcome.metrics["kvtier:loaded_chunks_total"] == chunks


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of the file tier that `disk` fills and `restarted` finds."""
    return tmp_path_factory.mktemp("store")


@pytest.fixture(scope="module")
def disk(run: Run, store: Path, tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """Host memory for two prompts, and a disk. Requests come, go away while their chunks come, and
    preempt each other."""
    endpoint = f"ipc://{tmp_path_factory.mktemp('events') / 'kv'}"
    acts = [
        *one_by_one("first", *PROMPTS),
        {"act": "stored", "path": str(store), "chunks": CHUNKS},
        *one_by_one("again", *PROMPTS),
        {"act": "metrics", "label": "metrics"},
        *({"act": "abort", "prompts": PROMPTS, "steps": steps} for steps in (1, 2, 3, 5)),
        {"act": "generate", "label": "crowd", "prompts": CROWD, "params": LONG},
        *one_by_one("at last", *PROMPTS),
        {"act": "events", "label": "events", "replay": f"{endpoint}-replay"},
    ]
    connector = spec(cpu_bytes_to_use=1 << 20, secondary_tiers=[file_tier(store)])
    return run(acts, connector, events=endpoint)


def test_prefixes_return_from_disk(disk: Outcome, computed: list[Any]) -> None:
    assert disk.answers("first") == disk.answers("again") == computed
    assert disk.cached("first") == [0] * len(PROMPTS)
    assert disk.cached("again") == RETURNED
    [metrics] = disk.of("metrics")
    assert metrics["vllm:kv_offload_tiering_read_bytes_total{1:file}"] > 0


def test_preemption_and_aborts_under_load(disk: Outcome, computed: list[Any]) -> None:
    """Requests that do not fit together, and requests that are gone while their chunks come."""
    assert disk.metrics["vllm:num_preemptions_total"] > 0
    [crowd] = disk.of("crowd")
    assert [request["reason"] for request in crowd] == ["length"] * len(CROWD)
    assert disk.answers("at last") == computed
    assert disk.cached("at last") == RETURNED


def test_events_say_what_each_tier_got_and_lost(disk: Outcome) -> None:
    """Through vLLM's publisher: every chunk of the first round reached host memory and the disk."""
    [events] = disk.of("events")
    blocks: Counter[tuple[str, str, str | None]] = Counter()
    for kind, medium, owner, hashes in events:
        blocks[kind, medium, owner] += len(hashes)
    assert blocks["stored", "CPU", None] >= CHUNKS
    assert blocks["stored", "STORAGE", "file"] >= CHUNKS
    # Host memory holds 32 chunks, the disk all of them.
    gone = blocks["removed", "CPU", None]
    assert blocks["stored", "CPU", None] - gone <= 32
    assert blocks["removed", "STORAGE", "file"] == 0


@pytest.fixture(scope="module")
def restarted(run: Run, store: Path, disk: Outcome) -> Outcome:
    """Another engine on that disk; then all of it is damaged while it serves."""
    assert disk.metrics
    acts = [
        *one_by_one("found", *PROMPTS),
        {"act": "damage", "label": "damage", "path": str(store)},
        *one_by_one("damaged", *PROMPTS),
        {"act": "stored", "path": str(store), "chunks": CHUNKS},
        *one_by_one("again", *PROMPTS),
    ]
    connector = spec(cpu_bytes_to_use=1 << 20, secondary_tiers=[file_tier(store)])
    return run(acts, connector, processes=True)


def test_a_restarted_engine_finds_what_the_last_one_stored(
    restarted: Outcome, computed: list[Any]
) -> None:
    assert restarted.answers("found") == computed
    assert restarted.cached("found") == RETURNED


def test_damaged_chunks_are_computed_and_stored_anew(
    restarted: Outcome, computed: list[Any]
) -> None:
    assert restarted.of("damage") > [0]
    assert restarted.answers("damaged") == restarted.answers("again") == computed
    assert restarted.metrics["kvtier:tier_corrupt_chunks_total{1:file}"] > 0
    assert restarted.cached("again") == RETURNED


@pytest.mark.parametrize(
    ("faults", "figure"),
    [
        ({"full": 1.0}, "vllm:kv_offload_tiering_cascade_job_failures_total{1:bad}"),
        ({"hang": 1.0}, "kvtier:tier_jobs_overdue_total{1:bad}"),
        ({"corrupt": 1.0}, "kvtier:tier_corrupt_chunks_total{1:bad}"),
    ],
    ids=["full", "hung", "corrupt"],
)
def test_a_bad_disk_costs_hits_and_nothing_else(
    run: Run, computed: list[Any], tmp_path: Path, faults: dict[str, float], figure: str
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
    acts = [
        *one_by_one("first", *PROMPTS),
        *one_by_one("again", *PROMPTS),
        {"act": "until", "figure": figure, "prompt": PROMPTS[0]},
        *one_by_one("at last", *PROMPTS),
    ]
    outcome = run(acts, connector)
    for label in ("first", "again", "at last"):
        assert outcome.answers(label) == computed
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
    """The second round loads what the first one computed, as so many chunks."""
    settings = spec(cpu_bytes_to_use=700_000, secondary_tiers=[file_tier(tmp_path)], **connector)
    stored = {"act": "stored", "path": str(tmp_path), "chunks": chunks}
    acts = [*one_by_one("first", *PROMPTS), stored, *one_by_one("again", *PROMPTS)]
    outcome = run(acts, settings, model=model, **engine)
    assert outcome.cached("first") == [0] * len(PROMPTS)
    assert min(outcome.cached("again")) >= 384
    assert outcome.answers("again") == outcome.answers("first")
    assert outcome.metrics["kvtier:loaded_chunks_total"] > 0
    assert outcome.metrics["vllm:kv_offload_tiering_read_bytes_total{1:file}"] > 0


def apart(answer: Any, other: Any) -> float:
    """By how much the log-probabilities of decoded tokens differ at most."""
    most = 0.0
    for step, step_other in zip(answer[1][1:], other[1][1:], strict=True):
        one, another = dict(map(tuple, step)), dict(map(tuple, step_other))
        most = max(most, *(abs(one[token] - another[token]) for token in one.keys() & another))
    return most


def test_a_replicated_latent_cache_returns_from_disk(run: Run, tmp_path: Path) -> None:
    """Two ranks with the same bytes (MLA): one of them stores, both load.

    vLLM's CPU kernels compute no prompt behind a prefix: they give the last token of a prompt as if
    it were alone when the rest was loaded, by any connector. What is decoded after it sees the
    loaded prefix. So the tokens are given, compared is what the model thinks of them, and another
    prompt's prefix shows by how much a wrong one would be off.
    """
    latent = prompts(481, 465, 497, seed=4)
    given = {"allowed_token_ids": [7]}
    settings = spec(cpu_bytes_to_use=2_600_000, secondary_tiers=[file_tier(tmp_path)])
    outcome = run(
        [
            *one_by_one("first", *latent, params=given),
            {"act": "stored", "path": str(tmp_path), "chunks": sum(map(len, latent)) // 16},
            *one_by_one("again", *latent, params=given),
        ],
        settings,
        model="latent",
        dtype="float32",
        block_size=16,
        num_gpu_blocks_override=40,
        max_model_len=512,
        tensor_parallel_size=2,
        processes=True,
    )
    assert outcome.cached("first") == [0] * len(latent)
    assert outcome.cached("again") == [len(prompt) - 1 for prompt in latent]
    assert outcome.metrics["vllm:kv_offload_tiering_read_bytes_total{1:file}"] > 0
    first, again = outcome.answers("first"), outcome.answers("again")
    right = [apart(*pair) for pair in zip(first, again, strict=True)]
    wrong = [apart(*pair) for pair in zip(first, again[1:] + again[:1], strict=True)]
    assert max(right) < min(wrong) / 4, (right, wrong)
