"""Processes that share a server: of one namespace they serve each other, of two they never do."""

from __future__ import annotations

import multiprocessing
import os
from typing import Any

import pytest
from tests.network.redis_servers import Cluster, Server

from kvtier import MISS, errors
from kvtier.testing.engine import Engine, key

NUMBERS = list(range(24))


def engine(config: dict[str, Any], namespace: str = "a model", **options: Any) -> Engine:
    return Engine({"type": "redis", **config}, slots=64, namespace=namespace, **options)


def store(config: dict[str, Any], numbers: list[int]) -> None:
    writer = engine(config)
    writer.store(numbers)
    writer.close()


def store_elsewhere(config: dict[str, Any], numbers: list[int]) -> None:
    """Stores in a process of its own."""
    process = multiprocessing.get_context("spawn").Process(target=store, args=(config, numbers))
    process.start()
    process.join(60)
    assert process.exitcode == 0


def test_another_process_serves_what_this_one_stored(shared_server: Server) -> None:
    config = {"url": shared_server.url, "prefix": "sharing", "absent_for_s": 0.01}
    reader = engine(config)
    assert reader.ask(NUMBERS) == [MISS] * len(NUMBERS)
    store_elsewhere(config, NUMBERS)
    reader.forget()
    assert reader.bring(NUMBERS) == NUMBERS
    reader.close()


def test_processes_share_a_cluster(shared_cluster: Cluster) -> None:
    store_elsewhere({"nodes": shared_cluster.nodes[:1], "prefix": "sharing"}, NUMBERS)
    reader = engine({"nodes": shared_cluster.nodes[-1:], "prefix": "sharing"})
    assert reader.bring(NUMBERS) == NUMBERS
    reader.close()


def test_other_namespaces_and_shapes_find_nothing(shared_server: Server) -> None:
    config = {"url": shared_server.url, "prefix": "apart"}
    store(config, NUMBERS)
    others: list[dict[str, Any]] = [{"namespace": "another model"}, {"chunk_bytes": 8192}]
    for other in others:
        reader = engine(config, **other)
        assert reader.ask(NUMBERS) == [MISS] * len(NUMBERS)
        reader.store(NUMBERS)
        reader.close()
    reader = engine(config)
    assert reader.bring(NUMBERS) == NUMBERS, "its own chunks, under the same keys"
    reader.close()


def test_a_look_up_of_512_keys_is_one_round_trip(shared_server: Server) -> None:
    asking = engine({"url": shared_server.url, "prefix": "round-trip"})
    asking.ask([0])  # so that a connection is there
    before = asking.tier["details"]
    asking.ask(list(range(1000, 1512)))
    after = asking.tier["details"]
    counted = {name: after[name] - before[name] for name in after}
    assert (counted["questions"], counted["keys_asked"]) == (1, 512)
    assert (counted["round_trips"], counted["connects"]) == (1, 0)
    asking.close()


def test_a_chunk_lives_as_long_as_ttl_s_says(shared_server: Server) -> None:
    config = {"url": shared_server.url, "prefix": "ttl", "ttl_s": 77, "part_bytes": 4096}
    short = engine(config, chunk_bytes=3 * 4096)
    short.store([1])
    short.close()
    with shared_server.client() as client:
        lives = [client.ttl(name) for name in client.scan_iter("ttl:*")]
    assert len(lives) == 3
    assert all(70 < life <= 77 for life in lives)


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_fork_is_refused_and_ends_cleanly(shared_server: Server) -> None:
    parent = engine({"url": shared_server.url, "prefix": "fork"})
    parent.store(NUMBERS)
    parent.settle()
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            parent.manager.lookup(1, [key(1)])
        except errors.ForkError:
            os.write(writer, b"refused")
        del parent
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        assert pipe.read() == b"refused"
    assert os.waitpid(pid, 0)[1] == 0
    parent.forget()
    assert parent.bring(NUMBERS) == NUMBERS
    parent.close()
