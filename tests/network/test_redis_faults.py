"""What fails on the way to a server, or on it, is a miss with a counted cause, and passes.

Every comparison is of bytes: `Engine.bring` fails on a chunk that came back with other ones.
"""

from __future__ import annotations

import logging
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import redis
from tests.network import redis_servers
from tests.network.fault_proxy import FaultProxy, fault_proxy
from tests.network.redis_servers import Cluster, Server, free_port, until

from kvtier.testing.engine import Engine

ENVELOPE_BYTES = 128
NUMBERS = list(range(12))

# Short enough for a test; the defaults are `kvtier.config`'s.
IMPATIENT: Mapping[str, Any] = {
    "type": "redis",
    "load_deadline_s": 2,
    "store_deadline_s": 2,
    "lookup_deadline_s": 1,
    "response_timeout_s": 0.3,
    "connect_timeout_s": 0.3,
    "absent_for_s": 0.05,
    "breaker_failures": 3,
    "breaker_pause_s": 0.1,
    "breaker_max_pause_s": 0.2,
}


class Client(Engine):
    """An engine over a redis tier that gives up soon."""

    def __init__(self, *, chunk_bytes: int = 1 << 16, slots: int = 64, **config: Any) -> None:
        super().__init__({**IMPATIENT, **config}, slots=slots, chunk_bytes=chunk_bytes)

    def counted(self, name: str) -> int:
        """A counter of the tier."""
        return int(self.tier["details"][name])

    def comes(self, numbers: list[int]) -> bool:
        """Whether all chunks come from the tier now."""
        self.forget()
        return self.bring(numbers) == numbers

    def recovers(self, numbers: list[int]) -> None:
        """Computes again what is missing, as an engine does, until everything comes again."""

        def all_come() -> bool:
            self.forget()
            came = self.bring(numbers)
            if came == numbers:
                return True
            self.store([number for number in numbers if number not in came])
            return False

        until(all_come, "everything")


@pytest.fixture
def proxy(server: Server) -> Iterator[FaultProxy]:
    with fault_proxy(server.port) as proxy:
        yield proxy


# One server.


def test_a_server_that_is_killed_and_comes_back_empty(server: Server) -> None:
    engine = Client(url=server.url)
    engine.store(NUMBERS)
    assert engine.comes(NUMBERS)
    server.kill()
    engine.forget()
    assert engine.bring(NUMBERS) == []
    assert engine.counted("unreachable") > 0
    server.start()
    engine.recovers(NUMBERS)
    engine.close()


def test_a_server_that_stands_still_and_goes_on(server: Server) -> None:
    engine = Client(url=server.url)
    engine.store(NUMBERS)
    assert engine.comes(NUMBERS)
    server.send(signal.SIGSTOP)
    engine.forget()
    assert engine.bring(NUMBERS) == []
    assert engine.counted("timed_out") > 0
    assert engine.counted("nodes_switched_off") > 0
    server.send(signal.SIGCONT)
    engine.recovers(NUMBERS)
    engine.close()


def test_a_connection_that_is_cut_within_a_value(proxy: FaultProxy) -> None:
    engine = Client(url=proxy.url)
    engine.store(NUMBERS)
    engine.settle()
    proxy.cut_after(100_000)
    assert engine.comes(NUMBERS), "it is asked again"
    assert proxy.faults == 1
    assert not engine.counted("bad_checksum")
    engine.close()


@pytest.mark.parametrize(("at", "cause"), [(60, "bad_header"), (40_000, "bad_checksum")])
def test_a_byte_that_is_flipped_on_the_way(proxy: FaultProxy, at: int, cause: str) -> None:
    engine = Client(url=proxy.url)
    engine.store([1])
    assert engine.comes([1]), "so that the next answer is the value"
    engine.forget()
    proxy.flip_at(at)
    assert engine.bring([1]) == []
    assert proxy.faults == 1
    assert engine.counted(cause) == 1
    assert engine.tier["load_failures"]["corrupt"] == 1
    engine.recovers([1])
    engine.close()


def test_answers_that_are_late(proxy: FaultProxy) -> None:
    engine = Client(url=proxy.url)
    engine.store(NUMBERS)
    engine.settle()
    proxy.delay(0.02)
    assert engine.comes(NUMBERS)
    proxy.hang()
    engine.forget()
    assert engine.bring(NUMBERS) == []
    proxy.flow()
    proxy.delay(0)
    engine.recovers(NUMBERS)
    engine.close()


def read(client: redis.Redis, name: bytes) -> bytes:
    value = client.get(name)
    assert isinstance(value, bytes)
    return value


def truncated(client: redis.Redis, name: bytes) -> bytes:
    return read(client, name)[:-1]


def without_payload(client: redis.Redis, name: bytes) -> bytes:
    return read(client, name)[:ENVELOPE_BYTES]


def shorter_than_a_header(client: redis.Redis, name: bytes) -> bytes:
    return read(client, name)[:9]


def somebody_elses(_client: redis.Redis, _name: bytes) -> bytes:
    return b"what another program keeps here" * 10


def another_chunks(client: redis.Redis, name: bytes) -> bytes:
    (other,) = [other for other in client.scan_iter("*}") if other != name]
    return read(client, other)


@pytest.mark.parametrize(
    ("value", "cause"),
    [
        (truncated, "bad_length"),
        (without_payload, "bad_length"),
        (shorter_than_a_header, "bad_header"),
        (somebody_elses, "bad_header"),
        (another_chunks, "other_key"),
    ],
)
def test_a_value_that_is_not_the_chunk(
    server: Server, value: Callable[[redis.Redis, bytes], bytes], cause: str
) -> None:
    engine = Client(url=server.url)
    engine.store([1, 2])
    engine.settle()
    with server.client() as client:
        name = next(name for name in client.scan_iter("*}") if name.endswith(b"1}"))
        client.set(name, value(client, name))
        engine.forget()
        assert engine.bring([1, 2]) == [2]
        assert engine.counted(cause) == 1
        assert engine.tier["load_failures"]["corrupt"] == 1
        until(lambda: not client.exists(name), "its removal")
    engine.recovers([1, 2])
    engine.close()


def test_a_part_that_is_gone(server: Server) -> None:
    engine = Client(url=server.url, part_bytes=1 << 14)
    engine.store([1])
    engine.settle()
    with server.client() as client:
        assert len(list(client.scan_iter("*}:*"))) == 3
        client.delete(next(client.scan_iter("*}:*:2")))
    engine.forget()
    assert engine.bring([1]) == []
    assert engine.counted("bad_length") == 1
    engine.recovers([1])
    engine.close()


def test_a_value_that_is_no_string(server: Server) -> None:
    engine = Client(url=server.url)
    engine.store([1])
    engine.settle()
    with server.client() as client:
        (name,) = client.scan_iter("*}")
        client.delete(name)
        client.lpush(name, "a list")
    engine.forget()
    assert engine.bring([1]) == []
    assert engine.counted("refused") > 0
    engine.close()


def test_memory_pressure_is_misses(tmp_path: Path) -> None:
    limits = ("--maxmemory", "8mb", "--maxmemory-policy", "allkeys-lru")
    with redis_servers.server(tmp_path, *limits) as server:
        engine = Client(url=server.url, chunk_bytes=1 << 18)
        numbers = list(range(60))
        engine.store(numbers)
        engine.forget()
        came = engine.bring(numbers)
        assert 0 < len(came) < len(numbers)
        assert not engine.tier["load_failures"]["corrupt"]
        engine.close()


def test_a_full_server_refuses_stores(tmp_path: Path) -> None:
    limits = ("--maxmemory", "4mb", "--maxmemory-policy", "noeviction")
    with redis_servers.server(tmp_path, *limits) as server:
        engine = Client(url=server.url, chunk_bytes=1 << 18)
        numbers = list(range(40))
        engine.store(numbers)
        engine.settle()
        tier = engine.tier
        assert tier["store_failures"]["full"] > 0
        engine.forget()
        assert len(engine.bring(numbers)) == tier["stores"]
        engine.close()


# Settings that do not fit.


def test_a_name_that_does_not_resolve() -> None:
    engine = Client(url="redis://no-such-host.invalid")
    engine.store([1])
    engine.forget()
    assert engine.bring([1]) == []
    assert engine.counted("unreachable") > 0
    engine.close()


def test_a_server_that_is_not_there() -> None:
    engine = Client(url=f"redis://127.0.0.1:{free_port()}")
    engine.store([1])
    engine.forget()
    assert engine.bring([1]) == []
    engine.close()


def test_a_wrong_password_is_refused_and_not_shown(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with redis_servers.server(tmp_path, "--requirepass", "right") as server:
        url = f"redis://:hunter2@127.0.0.1:{server.port}"
        with caplog.at_level(logging.DEBUG, "kvtier"):
            engine = Client(url=url)
            engine.store([1])
            engine.forget()
            assert engine.bring([1]) == []
            assert engine.counted("refused") > 0
            engine.close()
        until(lambda: "WRONGPASS" in caplog.text, "the log line")
        assert "hunter2" not in caplog.text
        engine = Client(url=f"redis://:right@127.0.0.1:{server.port}")
        engine.recovers([1])
        engine.close()


def test_an_acl_user(tmp_path: Path) -> None:
    user = ("--user", "cache", "on", ">secret", "~kvtier:*", "+@all", "-@dangerous")
    with redis_servers.server(tmp_path, *user) as server:
        login: dict[str, Any] = {"username": "cache", "password": "secret"}
        engine = Client(nodes=[f"127.0.0.1:{server.port}"], **login)
        engine.recovers(NUMBERS)
        engine.close()


def test_a_certificate_that_is_not_known(tmp_path: Path) -> None:
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("openssl is not installed")
    certificate, secret = tmp_path / "certificate.pem", tmp_path / "key.pem"
    made = (
        f"req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=localhost -out {certificate} "
        f"-keyout {secret} -addext subjectAltName=DNS:localhost -addext basicConstraints=CA:FALSE"
    )
    subprocess.run([openssl, *made.split()], check=True, capture_output=True)
    port = free_port()
    tls = ("--port", "0", "--tls-port", str(port), "--tls-auth-clients", "no")
    files = ("--tls-cert-file", str(certificate), "--tls-key-file", str(secret))
    server = Server(tmp_path, *tls, *files, port=port)
    try:
        url = f"rediss://localhost:{port}"
        engine = Client(url=url)
        engine.store(NUMBERS)
        engine.forget()
        assert engine.bring(NUMBERS) == []
        assert engine.counted("unreachable") > 0
        engine.close()
        engine = Client(url=url, tls_ca=certificate, connect_timeout_s=5)
        engine.recovers(NUMBERS)
        engine.close()
    finally:
        server.kill()


# A cluster.


def test_a_master_that_is_killed(cluster: Cluster) -> None:
    engine = Client(nodes=cluster.nodes)
    numbers = list(range(48))
    engine.store(numbers)
    assert engine.comes(numbers)
    cluster.masters()[0].kill()
    # Its replica serves reads before and after the cluster makes it a master.
    engine.recovers(numbers)
    until(lambda: len(cluster.masters()) == 3, "the failover")
    engine.recovers(numbers)
    new = list(range(100, 148))

    def stored() -> bool:
        engine.store([number for number in new if number not in engine.compare(new)])
        return engine.comes(new)

    until(stored, "stores to all shards")
    engine.close()


def test_a_master_that_stands_still_takes_no_other_nodes_keys(cluster: Cluster) -> None:
    engine = Client(nodes=cluster.nodes, hedge_after_s=0)
    numbers = list(range(48))
    engine.store(numbers)
    assert engine.comes(numbers)
    hung = cluster.masters()[0]
    with hung.client() as client:
        theirs = int(client.dbsize())
    hung.send(signal.SIGSTOP)
    engine.forget()
    assert len(engine.bring(numbers)) == len(numbers) - theirs
    hung.send(signal.SIGCONT)
    engine.recovers(numbers)
    engine.close()


def test_a_shard_that_is_gone_costs_its_own_keys_only(cluster: Cluster) -> None:
    engine = Client(nodes=cluster.nodes)
    numbers = list(range(48))
    engine.store(numbers)
    assert engine.comes(numbers)
    master = cluster.masters()[0]
    with master.client() as client:
        theirs = int(client.dbsize())
    cluster.replica_of(master).kill()
    master.kill()
    engine.forget()
    assert len(engine.bring(numbers)) == len(numbers) - theirs
    engine.close()


def test_every_node_down_and_back(cluster: Cluster) -> None:
    engine = Client(nodes=cluster.nodes)
    engine.store(NUMBERS)
    assert engine.comes(NUMBERS)
    for server in cluster.servers:
        server.send(signal.SIGSTOP)
    engine.forget()
    assert engine.bring(NUMBERS) == []
    for server in cluster.servers:
        server.send(signal.SIGCONT)
    engine.recovers(NUMBERS)
    engine.close()
