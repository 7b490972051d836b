"""Two engines share a Redis cluster and serve each other's prefixes, while a master is killed."""

from __future__ import annotations

import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tests.network import redis_servers
from tests.network.redis_servers import Cluster, until
from tests.vllm.conftest import BLOCK, Run, one_by_one, prompts, spec

pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.skipif(not shutil.which("redis-server"), reason="redis-server is not installed"),
]

PROMPTS = prompts(500, 520, 540, 513)
RETURNED = [(len(prompt) - 1) // BLOCK * BLOCK for prompt in PROMPTS]


def stored(cluster: Cluster) -> int:
    """Chunks on all masters."""
    count = 0
    for master in cluster.masters():
        with master.client() as client:
            count += int(client.dbsize())
    return count


def test_engines_serve_each_other_while_a_master_dies(run: Run, tmp_path: Path) -> None:
    computed = run(one_by_one("all", *PROMPTS), None, enable_prefix_caching=False).answers("all")
    with redis_servers.cluster(tmp_path) as cluster:
        limits = {"max_queued_bytes": 1 << 26, "high_water_s_per_mib": 60.0}
        tier = {"type": "redis", "nodes": cluster.nodes, "lookup_deadline_s": 5, **limits}
        connector = spec(cpu_bytes_to_use=1 << 20, secondary_tiers=[tier])
        died = tmp_path / "died"
        gate = {"act": "until file", "path": str(died)}
        ours, theirs = PROMPTS[:2], PROMPTS[2:]
        with ThreadPoolExecutor(2) as engines:
            first, second = (
                engines.submit(
                    run, [*one_by_one("own", *own), gate, *one_by_one("others", *others)], connector
                )
                for own, others in ((ours, theirs), (theirs, ours))
            )
            until(lambda: stored(cluster) == sum(RETURNED) // BLOCK, "all chunks", 240)
            cluster.masters()[0].kill()
            died.touch()
            outcomes = first.result(), second.result()
    mine, yours = computed[:2], computed[2:]
    for outcome, own, others, cached in (
        (outcomes[0], mine, yours, RETURNED[2:]),
        (outcomes[1], yours, mine, RETURNED[:2]),
    ):
        assert outcome.answers("own") == own
        assert outcome.answers("others") == others
        assert outcome.cached("own") == [0, 0]
        assert outcome.cached("others") == cached
