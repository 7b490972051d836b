"""Other ways to a Redis server: a plain socket with one fixed buffer, and redis-py."""

from __future__ import annotations

import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.util import find_spec

from kvtier.errors import ConfigError, TierError

__all__ = ["BenchServer", "RawSocket", "RedisPy", "own_server"]

_PATIENCE_S = 10.0


@dataclass(frozen=True)
class BenchServer:
    """A server to measure with: where it listens, and its process if it is ours."""

    host: str
    port: int
    process: subprocess.Popen[bytes] | None = None


@contextmanager
def own_server() -> Iterator[BenchServer]:
    """A redis-server of its own on loopback, ended with the `with`."""
    program = shutil.which("redis-server")
    if program is None:
        raise ConfigError("redis-server is not installed: install it, or name one with --redis")
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        host, port = listener.getsockname()
    with tempfile.TemporaryDirectory(prefix="kvtier-bench-") as directory:
        options = ("--bind", host, "--port", str(port), "--save", "", "--dir", directory)
        process = subprocess.Popen([program, *options], stdout=subprocess.DEVNULL)
        try:
            _wait_for(host, port)
            yield BenchServer(host, port, process)
        finally:
            process.kill()
            process.wait()


def _wait_for(host: str, port: int) -> None:
    end = time.monotonic() + _PATIENCE_S
    while True:
        with suppress(OSError), socket.create_connection((host, port)):
            return
        if time.monotonic() > end:
            raise TierError(f"redis-server does not listen on {host}:{port}")
        time.sleep(0.01)


class RawSocket:
    """The commands of the tier over one connection, one after the other, nothing checked."""

    def __init__(self, host: str, port: int, value_bytes: int) -> None:
        self._socket = socket.create_connection((host, port))
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._buffer = memoryview(bytearray(value_bytes + 2))

    def close(self) -> None:
        """Closes the connection."""
        self._socket.close()

    def command(self, *parts: bytes) -> bytes:
        """Sends a small command; returns the first line of its reply."""
        self._socket.sendall(_packed(parts))
        return self._line()

    def load(self, names: Sequence[bytes]) -> None:
        """Reads values into the buffer."""
        for name in names:
            length = int(self.command(b"GET", name)[1:])
            if length != len(self._buffer) - 2:
                raise TierError(f"the value of {name!r} has {length} bytes")
            self._receive(self._buffer)

    def store(self, names: Sequence[bytes]) -> None:
        """Writes values from the buffer."""
        value = self._buffer[:-2]
        for name in names:
            head = b"*4\r\n" + _words((b"SET", name)) + b"$%d\r\n" % len(value)
            self._send(head, value, b"\r\n$2\r\nNX\r\n")
            if self._line() != b"+OK":
                raise TierError(f"the server did not take {name!r}")

    def exist(self, packed: bytes, count: int) -> None:
        """Sends a packed pipeline of EXISTS and reads its replies."""
        self._socket.sendall(packed)
        self._receive(self._buffer[: 4 * count])

    def _send(self, *pieces: bytes | memoryview) -> None:
        left = [memoryview(piece) for piece in pieces]
        while left:
            sent = self._socket.sendmsg(left)
            while left and sent >= len(left[0]):
                sent -= len(left.pop(0))
            if left:
                left[0] = left[0][sent:]

    def _receive(self, place: memoryview) -> None:
        received = 0
        while received < len(place):
            count = self._socket.recv_into(place[received:])
            if not count:
                raise TierError("the server closed the connection")
            received += count

    def _line(self) -> bytes:
        # The reply's head comes with the value: what is not the line stays in the socket.
        seen = self._socket.recv(64, socket.MSG_PEEK)
        while b"\r\n" not in seen:
            seen = self._socket.recv(64, socket.MSG_PEEK)
        line = seen[: seen.index(b"\r\n")]
        self._socket.recv(len(line) + 2)
        return line


class RedisPy:
    """redis-py with hiredis."""

    def __init__(self, host: str, port: int, value_bytes: int) -> None:
        import redis

        self._client = redis.Redis(host=host, port=port)
        self._value = bytes(value_bytes)

    @staticmethod
    def is_installed() -> bool:
        """Whether both packages are there."""
        return find_spec("redis") is not None and find_spec("hiredis") is not None

    def close(self) -> None:
        """Closes its connections."""
        self._client.close()

    def load(self, names: Sequence[bytes]) -> None:
        """Reads values."""
        for name in names:
            self._client.get(name)

    def store(self, names: Sequence[bytes]) -> None:
        """Writes values."""
        for name in names:
            self._client.set(name, self._value, nx=True)


def _packed(parts: Sequence[bytes]) -> bytes:
    return b"*%d\r\n" % len(parts) + _words(parts)


def _words(parts: Sequence[bytes]) -> bytes:
    return b"".join(b"$%d\r\n%b\r\n" % (len(part), part) for part in parts)
