"""A Mooncake Store on loopback: a master, and nodes that lend memory, processes of their own."""

from __future__ import annotations

import contextlib
import importlib.util
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

PATIENCE_S = 60.0

# Lends memory until its input ends. Tells what its memory is called, which a value in it knows.
_NODE = """
import sys
from mooncake.store import MooncakeDistributedStore, ReplicateConfig
store = MooncakeDistributedStore()
code = store.setup("127.0.0.1", "P2PHANDSHAKE", int(sys.argv[2]), 16 << 20, "tcp", "", sys.argv[1])
assert code == 0, code
here = ReplicateConfig()
here.preferred_segment = name = store.get_hostname()
assert store.put(name, b"here", here) == 0
(replica,) = store.get_replica_desc(name)
print("joined", replica.get_memory_descriptor().buffer_descriptor.transport_endpoint, flush=True)
sys.stdin.read()
"""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class Process:
    """A process that is killed at the end, stopped or not."""

    def __init__(self, *command: object) -> None:
        self.command = [str(part) for part in command]
        self.start()

    def start(self) -> None:
        self.process = subprocess.Popen(
            self.command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate(timeout=PATIENCE_S)

    def __enter__(self) -> Any:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.kill()


class Master(Process):
    def __init__(self) -> None:
        found = importlib.util.find_spec("mooncake")
        assert found is not None
        assert found.origin is not None
        self.port = free_port()
        super().__init__(
            Path(found.origin).with_name("mooncake_master"),
            "-rpc_address=127.0.0.1",
            f"-rpc_port={self.port}",
            "-metrics_host=127.0.0.1",
            f"-metrics_port={free_port()}",
            "-default_kv_lease_ttl=500",
        )

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"


class Node(Process):
    def __init__(self, master: Master, memory: int = 256 << 20) -> None:
        super().__init__(sys.executable, "-c", _NODE, master.address, memory)
        assert self.process.stdout is not None
        said = self.process.stdout.readline().split()
        assert said[0] == "joined", said
        self.endpoint = said[1]
        """What its chunks name it by."""


@contextlib.contextmanager
def mooncake(nodes: int) -> Iterator[tuple[Master, list[Node]]]:
    """A master, and nodes that lend memory to whoever stores."""
    with contextlib.ExitStack() as stack:
        master = stack.enter_context(Master())
        yield master, [stack.enter_context(Node(master)) for _ in range(nodes)]


@contextlib.contextmanager
def client(master: Master) -> Iterator[Any]:
    """Another member of the store, to look behind a tier's back."""
    from mooncake.store import MooncakeDistributedStore

    store = MooncakeDistributedStore()
    assert store.setup("127.0.0.1", "P2PHANDSHAKE", 0, 16 << 20, "tcp", "", master.address) == 0
    try:
        yield store
    finally:
        store.close()
