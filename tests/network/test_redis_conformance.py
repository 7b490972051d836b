"""The redis tier keeps the contract: on one server, with split values, and on a cluster."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
import redis
from tests.network.redis_servers import Cluster, Server

import kvtier.testing

ENVELOPE_BYTES = 128


def prefix(path: Path) -> str:
    """Keeps tests that share a server apart."""
    return hashlib.sha256(bytes(path)).hexdigest()[:16]


def flip(client: redis.Redis, names: Iterable[bytes]) -> None:
    """Flips a bit of each payload, behind its envelope if it has one."""
    for name in names:
        at = ENVELOPE_BYTES if name.endswith(b"}") else 0
        (byte,) = bytes(memoryview(client.getrange(name, at, at)))  # type: ignore[arg-type]
        client.setrange(name, at, bytes([byte ^ 1]))


class TestRedis(kvtier.testing.TierConformance):
    persistent = True

    @pytest.fixture(autouse=True)
    def _server(self, shared_server: Server) -> None:
        self.server = shared_server

    def config(self, path: Path, capacity_bytes: int) -> Mapping[str, Any]:  # noqa: ARG002
        return {"type": "redis", "url": self.server.url, "prefix": prefix(path)}

    def damage(self, path: Path) -> None:
        with self.server.client() as client:
            flip(client, client.scan_iter(f"{prefix(path)}:*"))


class TestRedisWithSplitValues(TestRedis):
    def config(self, path: Path, capacity_bytes: int) -> Mapping[str, Any]:
        # Chunks of 3 x 4096 and of 1 MiB in several values, the last one shorter.
        return {**super().config(path, capacity_bytes), "part_bytes": 5000}


class TestRedisCluster(kvtier.testing.TierConformance):
    persistent = True

    @pytest.fixture(autouse=True)
    def _cluster(self, shared_cluster: Cluster) -> None:
        self.cluster = shared_cluster

    def config(self, path: Path, capacity_bytes: int) -> Mapping[str, Any]:  # noqa: ARG002
        return {"type": "redis", "nodes": self.cluster.nodes[:1], "prefix": prefix(path)}

    def damage(self, path: Path) -> None:
        for master in self.cluster.masters():
            with master.client() as client:
                flip(client, client.scan_iter(f"{prefix(path)}:*"))
