"""vLLM's fs tier behind kvtier's manager, in vLLM's real engine."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.vllm.conftest import BLOCK, Run, one_by_one, prompts, spec

pytestmark = pytest.mark.timeout(600)

PROMPTS = prompts(500, 520, 540, 513)


def test_prefixes_return_from_a_tier_of_vllm(run: Run, tmp_path: Path) -> None:
    """A second engine gets all that the first one stored, with the same log-probabilities.

    The first one computes everything, and its end waits for the tier. Host memory holds one prompt.
    """
    tier = {"type": "vllm", "tier": {"type": "fs", "root_dir": str(tmp_path)}}
    # On a busy machine too every chunk is stored, and every look-up answered.
    patient = {"lookup_deadline_s": 60, "max_queued_bytes": 1 << 26, "high_water_s_per_mib": 60.0}
    tiers = [{**tier, **patient, "serve_unverified": True}]
    connector = spec(cpu_bytes_to_use=1 << 20, secondary_tiers=tiers, shutdown_drain_s=60)
    first = run(one_by_one(*PROMPTS), connector)
    second = run(one_by_one(*PROMPTS), connector)
    assert first.cached == [0] * len(PROMPTS)
    assert second.cached == [(len(prompt) - 1) // BLOCK * BLOCK for prompt in PROMPTS]
    assert second.texts == first.texts
    assert second.metrics["kvtier:tier_loaded_chunks_total{1:fs}"] == sum(second.cached) / BLOCK
    by_source = "vllm:prompt_tokens_cached_by_source_total"
    assert second.metrics[f"{by_source}{{disk}}"] == sum(second.cached)
    assert second.metrics[f"{by_source}{{host}}"] == 0
