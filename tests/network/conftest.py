from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.network import redis_servers
from tests.network.redis_servers import Cluster, Server


@pytest.fixture(autouse=True, scope="session")
def _needs_servers() -> None:
    if shutil.which("redis-server") is None:
        pytest.skip("redis-server is not installed (apt-get install redis-server)")


@pytest.fixture(scope="session")
def shared_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server that tests share and leave as it is, apart from their own keys."""
    with redis_servers.server(tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest.fixture(scope="session")
def shared_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A cluster that tests share and leave as it is, apart from their own keys."""
    with redis_servers.cluster(tmp_path_factory.mktemp("cluster")) as cluster:
        yield cluster


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    """A server of the test's own, to be hurt."""
    with redis_servers.server(tmp_path) as server:
        yield server


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    """A cluster of the test's own, to be hurt."""
    with redis_servers.cluster(tmp_path) as cluster:
        yield cluster
