"""A TCP proxy that goes wrong on purpose, between a tier and its server.

Faults hit what the server sends, since that is what could be served.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

__all__ = ["FaultProxy", "fault_proxy"]

_PIECE = 1 << 16


class FaultProxy:
    """Listens on `port` and passes bytes on to `target_port`, but for what it is told."""

    def __init__(self, target_port: int) -> None:
        self._target = target_port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        self._lock = threading.Lock()
        self._flows = threading.Event()
        self._flows.set()
        self._sockets: set[socket.socket] = set()
        self._cut_after: int | None = None
        self._flip_at: int | None = None
        self._pause_s = 0.0
        self.faults = 0
        self._closing = threading.Event()
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def url(self) -> str:
        """For the tier."""
        return f"redis://127.0.0.1:{self.port}"

    def cut_after(self, sent: int) -> None:
        """Closes the connection that sends the next `sent` bytes, once, in their middle."""
        with self._lock:
            self._cut_after = sent

    def flip_at(self, sent: int) -> None:
        """Flips a bit of the byte that comes after the next `sent` ones, once."""
        with self._lock:
            self._flip_at = sent

    def delay(self, seconds: float) -> None:
        """Lets each piece of an answer wait."""
        self._pause_s = seconds

    def hang(self) -> None:
        """Holds everything back, new connections too, until `flow`."""
        self._flows.clear()

    def flow(self) -> None:
        """Passes everything on again."""
        self._flows.set()

    def close(self) -> None:
        """Closes all connections."""
        self._closing.set()
        self._flows.set()
        self._listener.close()
        with self._lock:
            sockets = list(self._sockets)
        for connection in sockets:
            _shut(connection)

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
                server = socket.create_connection(("127.0.0.1", self._target))
            except OSError:
                if self._closing.is_set():
                    return
                _shut(client)
                continue
            with self._lock:
                self._sockets |= {client, server}
            for source, to, is_answer in ((client, server, False), (server, client, True)):
                arguments = (source, to, is_answer)
                threading.Thread(target=self._pass_on, args=arguments, daemon=True).start()

    def _pass_on(self, source: socket.socket, to: socket.socket, is_answer: bool) -> None:
        try:
            while piece := source.recv(_PIECE):
                self._flows.wait()
                if is_answer:
                    self._closing.wait(self._pause_s)
                    piece, goes_on = self._spoil(piece)
                    to.sendall(piece)
                    if not goes_on:
                        break
                else:
                    to.sendall(piece)
        except OSError:
            pass
        _shut(source)
        _shut(to)
        with self._lock:
            self._sockets -= {source, to}

    def _spoil(self, piece: bytes) -> tuple[bytes, bool]:
        with self._lock:
            if self._flip_at is not None:
                if self._flip_at < len(piece):
                    at, self._flip_at = self._flip_at, None
                    self.faults += 1
                    piece = piece[:at] + bytes([piece[at] ^ 1]) + piece[at + 1 :]
                else:
                    self._flip_at -= len(piece)
            if self._cut_after is not None:
                if self._cut_after < len(piece):
                    at, self._cut_after = self._cut_after, None
                    self.faults += 1
                    return piece[:at], False
                self._cut_after -= len(piece)
        return piece, True


def _shut(connection: socket.socket) -> None:
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
    connection.close()


@contextmanager
def fault_proxy(target_port: int) -> Iterator[FaultProxy]:
    """A proxy for a `with`."""
    proxy = FaultProxy(target_port)
    try:
        yield proxy
    finally:
        proxy.close()
