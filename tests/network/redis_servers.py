"""Real Redis servers on loopback: one, or a cluster; started by pid, ended with the test."""

from __future__ import annotations

import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import redis

__all__ = ["Cluster", "Server", "cluster", "free_port", "server", "until"]

PATIENCE_S = 60.0
SERVER = shutil.which("redis-server") or "redis-server"
CLI = shutil.which("redis-cli") or "redis-cli"


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def until(holds: Any, what: str, patience_s: float = PATIENCE_S) -> None:
    """Waits for a condition; exceptions of a server that is not there yet count as no."""
    end = time.monotonic() + patience_s
    while True:
        try:
            if holds():
                return
        except redis.RedisError:
            pass
        assert time.monotonic() < end, f"{what} does not come"
        time.sleep(0.02)


class Server:
    """One redis-server process."""

    def __init__(self, directory: Path, *options: str, port: int | None = None) -> None:
        self.port = port or free_port()
        self.directory = directory / str(self.port)
        self.directory.mkdir(parents=True, exist_ok=True)
        self.options = options
        self.start()

    def start(self) -> None:
        """Starts it, empty; returns when it answers."""
        listens = ("--port", str(self.port)) if "--tls-port" not in self.options else ()
        files = (
            "--dir",
            str(self.directory),
            "--logfile",
            "log",
            "--save",
            "",
            "--appendonly",
            "no",
        )
        self.process = subprocess.Popen(
            [SERVER, *listens, "--bind", "127.0.0.1", *files, *self.options]
        )
        until(self.answers, f"redis-server on port {self.port}")

    def answers(self) -> bool:
        """Whether it listens."""
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", self.port)) == 0

    @property
    def url(self) -> str:
        """For the tier and for `client`."""
        return f"redis://127.0.0.1:{self.port}"

    def client(self, **options: Any) -> redis.Redis:
        """A client of the tests' own."""
        return redis.Redis(port=self.port, socket_timeout=5, **options)

    def send(self, number: signal.Signals) -> None:
        """Sends a signal to the process."""
        self.process.send_signal(number)

    def kill(self) -> None:
        """Ends it as `kill -9` does."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(PATIENCE_S)


class Cluster:
    """Three masters with a replica each."""

    def __init__(self, directory: Path, *options: str, node_timeout_ms: int = 1500) -> None:
        def node() -> Server:
            bus = free_port()
            return Server(
                directory,
                *("--cluster-enabled", "yes", "--cluster-port", str(bus)),
                *("--cluster-node-timeout", str(node_timeout_ms)),
                *("--cluster-require-full-coverage", "no"),
                *options,
            )

        self.servers = [node() for _ in range(6)]
        addresses = [f"127.0.0.1:{server.port}" for server in self.servers]
        with_replicas = ("--cluster-replicas", "1", "--cluster-yes")
        made = subprocess.run(
            [CLI, "--cluster", "create", *addresses, *with_replicas],
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=False,
        )
        assert made.returncode == 0, made.stdout + made.stderr
        until(lambda: all(self.is_whole(server) for server in self.servers), "the cluster")

    @staticmethod
    def is_whole(server: Server) -> bool:
        """Whether a node sees all slots served and three masters with a linked replica each."""
        with server.client() as client:
            info = client.execute_command("CLUSTER INFO")
            role = client.execute_command("ROLE")
        linked = role[0] == b"master" or role[3] == b"connected"
        followed = role[0] != b"master" or len(role[2]) == 1
        return dict(info)["cluster_state"] == "ok" and linked and followed

    @property
    def nodes(self) -> list[str]:
        """For the tier's setting."""
        return [f"127.0.0.1:{server.port}" for server in self.servers]

    def masters(self) -> list[Server]:
        """The nodes that are masters now."""
        return [server for server in self.servers if self.role(server) == "master"]

    def replica_of(self, master: Server) -> Server:
        """Who follows a master."""
        with master.client() as client:
            ((_, port, _),) = client.execute_command("ROLE")[2]
        return next(server for server in self.servers if server.port == int(port))

    @staticmethod
    def role(server: Server) -> str:
        """`master`, `slave`, or `gone`."""
        try:
            with server.client() as client:
                return str(client.execute_command("ROLE")[0].decode())
        except redis.RedisError:
            return "gone"

    def kill(self) -> None:
        """Ends all nodes."""
        for server in self.servers:
            server.kill()


@contextmanager
def server(directory: Path, *options: str) -> Iterator[Server]:
    """One server for a `with`."""
    running = Server(directory, *options)
    try:
        yield running
    finally:
        running.kill()


@contextmanager
def cluster(directory: Path, *options: str) -> Iterator[Cluster]:
    """A cluster for a `with`."""
    running = Cluster(directory, *options)
    try:
        yield running
    finally:
        running.kill()
