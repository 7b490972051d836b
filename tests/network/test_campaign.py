"""A cluster under random failures: no wrong byte, nothing that hangs, nothing that stays.

A seed draws which node is stopped, goes on, is killed or comes back empty, while an engine stores
and brings chunks all the time. `CAMPAIGN_SECONDS=600 CAMPAIGN_SEED=7` runs it for longer and from
another seed (`make campaign`).
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections import Counter
from pathlib import Path

from tests.network import redis_servers
from tests.network.redis_servers import Cluster, Server, until
from tests.network.test_redis_faults import Client

from kvtier.testing.engine import batches

SECONDS = float(os.environ.get("CAMPAIGN_SECONDS", "20"))
SEED = int(os.environ.get("CAMPAIGN_SEED", "1"))
CHUNKS = 400
BATCH = 16
PART_BYTES = 1 << 15


class Trouble:
    """Hurts one node after the other; half of the nodes at most at a time."""

    def __init__(self, cluster: Cluster, draw: random.Random) -> None:
        self.cluster, self.draw = cluster, draw
        self.stopped: set[Server] = set()
        self.killed: set[Server] = set()
        self.done: Counter[str] = Counter()

    def next(self) -> None:
        """Does one thing."""
        hurt = self.stopped | self.killed
        well = [server for server in self.cluster.servers if server not in hurt]
        if hurt and (len(hurt) >= 3 or self.draw.random() < 0.4):
            self.heal(self.draw.choice(sorted(hurt, key=id)))
        elif self.draw.random() < 0.5:
            server = self.draw.choice(well)
            server.send(signal.SIGSTOP)
            self.stopped.add(server)
            self.done["stopped"] += 1
        else:
            server = self.draw.choice(well)
            server.kill()
            self.killed.add(server)
            self.done["killed"] += 1

    def heal(self, server: Server) -> None:
        """Lets a node go on, or starts it again: empty, with the cluster's map it had."""
        if server in self.stopped:
            server.send(signal.SIGCONT)
            self.stopped.remove(server)
        else:
            server.start()
            self.killed.remove(server)

    def end(self) -> None:
        """Heals everything."""
        for server in self.stopped | self.killed:
            self.heal(server)


def test_random_failures_of_a_cluster(tmp_path: Path) -> None:
    draw = random.Random(SEED)
    with redis_servers.cluster(tmp_path) as cluster:
        engine = Client(nodes=cluster.nodes, chunk_bytes=1 << 16, slots=128, part_bytes=PART_BYTES)
        trouble = Trouble(cluster, draw)
        asked, came = 0, 0
        end = time.monotonic() + SECONDS
        while time.monotonic() < end:
            trouble.next()
            for _ in range(8):
                numbers = sorted(draw.sample(range(CHUNKS), BATCH))
                engine.forget()
                brought = engine.bring(numbers)
                asked, came = asked + len(numbers), came + len(brought)
                engine.store([number for number in numbers if number not in brought])
        trouble.end()
        until(lambda: all(cluster.is_whole(server) for server in cluster.servers), "the cluster")
        for numbers in batches(range(64), BATCH):
            engine.recovers(numbers)
        tier = engine.tier
        assert tier["loads_overdue"] == tier["stores_overdue"] == 0
        assert tier["load_failures"]["corrupt"] == 0, "no value was ever torn"
        assert 0 < came < asked
        counted = {name: count for name, count in tier["details"].items() if count}
        print(f"seed {SEED}: {asked} asked, {came} came; {dict(trouble.done)}; {counted}")
        engine.close()
