"""An S3 server on loopback, and a proxy in front of it that goes wrong on purpose."""

from __future__ import annotations

import contextlib
import http.client
import os
import signal
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from tests.network.mooncake_store import PATIENCE_S, free_port

BUCKET = "chunks"
CREDENTIALS = {"access_key_id": "somebody", "secret_access_key": "a secret"}


class MotoServer:
    """moto's server, a process of its own."""

    def __init__(self) -> None:
        self.port = free_port()
        self.start()

    def start(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(self.port)],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "MOTO_ENABLE_ISO_REGIONS": "0"},
        )
        end = time.monotonic() + PATIENCE_S
        while True:
            with contextlib.suppress(OSError):
                connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=5)
                connection.request("GET", "/moto-api/")
                connection.getresponse().read()
                connection.close()
                break
            assert time.monotonic() < end, "the server does not begin"
            assert self.process.poll() is None, "the server ended"
            time.sleep(0.05)
        self.client().create_bucket(Bucket=BUCKET)

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def client(self) -> Any:
        """Somebody else, to look behind a tier's back."""
        import boto3

        return boto3.client(
            "s3",
            endpoint_url=self.endpoint,
            region_name="us-east-1",
            aws_access_key_id=CREDENTIALS["access_key_id"],
            aws_secret_access_key=CREDENTIALS["secret_access_key"],
        )

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(PATIENCE_S)


@contextlib.contextmanager
def s3_server() -> Iterator[MotoServer]:
    server = MotoServer()
    try:
        yield server
    finally:
        server.kill()


def error(status: int, code: str) -> tuple[int, bytes]:
    """What S3 answers when it refuses."""
    return status, f"<Error><Code>{code}</Code><Message>planted</Message></Error>".encode()


@dataclass
class Faults:
    """What the proxy does wrong."""

    answers: dict[str, tuple[int, bytes]] = field(default_factory=dict)
    """Status and body, by method, instead of asking the server."""
    spoil: Callable[[bytes], bytes] | None = None
    """Done to the body of what is got; one that comes out shorter is cut off there."""
    hang: threading.Event | None = None
    """Answers wait for it."""


class S3Proxy:
    """Passes requests on to a server, but for what `faults` says."""

    def __init__(self, target_port: int) -> None:
        self.faults = Faults()
        self.seen: list[str] = []
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def pass_on(self) -> None:
                proxy.seen.append(self.command)
                length = int(self.headers.get("content-length", 0))
                body = self.rfile.read(length)
                faults = proxy.faults
                if faults.hang is not None:
                    faults.hang.wait(PATIENCE_S)
                if planned := faults.answers.get(self.command):
                    status, answer = planned
                    self.answer(status, {}, answer)
                    return
                connection = http.client.HTTPConnection("127.0.0.1", target_port, timeout=30)
                connection.request(self.command, self.path, body, dict(self.headers))
                response = connection.getresponse()
                answer = response.read()
                headers = dict(response.getheaders())
                connection.close()
                if (
                    faults.spoil is not None
                    and self.command == "GET"
                    and "list-type" not in self.path
                ):
                    answer = faults.spoil(answer)
                self.answer(response.status, headers, answer)

            def answer(self, status: int, headers: dict[str, str], body: bytes) -> None:
                self.send_response(status)
                # Of a HEAD, and of a body that is cut off, the length is the server's.
                length = headers.get("Content-Length", str(len(body)))
                if int(length) > len(body):
                    self.close_connection = True
                for name, value in headers.items():
                    if name.lower() not in ("content-length", "transfer-encoding", "connection"):
                        self.send_header(name, value)
                self.send_header("Content-Length", length)
                self.end_headers()
                self.wfile.write(body)

            do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = pass_on

            def log_message(self, *_: object) -> None:
                pass

        class Server(ThreadingHTTPServer):
            daemon_threads = True

            def handle_error(self, *_: object) -> None:
                pass  # a client that gave up

        self.server = Server(("127.0.0.1", 0), Handler)
        self.endpoint = f"http://127.0.0.1:{self.server.server_address[1]}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def encrypt(self, certificate: Path, private_key: Path) -> None:
        """Speaks TLS from now on."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate, private_key)
        self.server.socket = context.wrap_socket(self.server.socket, server_side=True)
        self.endpoint = self.endpoint.replace("http:", "https:")

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()


@contextlib.contextmanager
def s3_proxy(server: MotoServer) -> Iterator[S3Proxy]:
    proxy = S3Proxy(server.port)
    try:
        yield proxy
    finally:
        proxy.close()
