"""The object tier beside boto3, on one S3 server in one run, with the same connections.

The server is `s3s-fs` on loopback, over a directory (`cargo install s3s-fs --features binary`).
Stores and loads of the tier go through the manager, checksums included; boto3 sends the same bytes
from memory, and receives them into memory that is there already. On a machine of few cores the
server takes most of them, so beside the rate there is what each client uses of the processor.
"""

from __future__ import annotations

import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from kvtier.bench.figures import Figure, alternate, compared, untaken
from kvtier.bench.tier_store import cpu_seconds, tier_store
from kvtier.errors import TierError

__all__ = ["measure"]

_CHUNKS = {"1MiB": 1 << 20, "4MiB": 4 << 20}
_TARGET_LOAD = 2.0
_TARGET_CPU = 0.5
_CONNECTIONS = 16
_BUCKET = "kvtier-bench"
_KEYS = {"access_key_id": "bench", "secret_access_key": "bench-secret"}
_BEGIN_S = 30.0


def measure(*, directory: str | None, size: int, rounds: int) -> Iterator[Figure]:
    """Yields the figures; the server's directory is made in `directory` and removed."""
    lacking = _lacking()
    for label, chunk_bytes in _CHUNKS.items():
        if lacking is not None:
            for verb in ("store", "load"):
                yield untaken(f"object.{verb}.{label}.boto3", "GB/s", lacking)
                yield untaken(f"object.{verb}.{label}.cpu", "s/GB", lacking)
            continue
        with (
            tempfile.TemporaryDirectory(prefix="kvtier-bench-", dir=directory) as place,
            _server(Path(place)) as endpoint,
            tier_store(_tier(endpoint), chunk_bytes, size) as ours,
        ):
            theirs = _Boto3(endpoint, chunk_bytes, ours.count)
            for verb, target in (("store", None), ("load", _TARGET_LOAD)):
                mine = _Client(getattr(ours, verb), ours.nbytes)
                other = _Client(getattr(theirs, verb), ours.nbytes)
                rates = alternate(rounds, mine.rate, other.rate)
                yield compared(
                    f"object.{verb}.{label}.boto3",
                    "GB/s",
                    rates[0],
                    reference="boto3",
                    theirs=rates[1],
                    target=target,
                )
                yield compared(
                    f"object.{verb}.{label}.cpu",
                    "s/GB",
                    mine.processor[1:],  # the first round warms up
                    reference="boto3",
                    theirs=other.processor[1:],
                    target=_TARGET_CPU,
                    smaller_is_better=True,
                )


class _Client:
    """Moves `nbytes` in a round, and notes what that used of this process's processor time."""

    def __init__(self, run: Callable[[], float], nbytes: int) -> None:
        self._run = run
        self._gigabytes = nbytes / 1e9
        self.processor: list[float] = []
        """Seconds a gigabyte, of each round."""

    def rate(self) -> float:
        """Does a round; gives its GB/s."""
        before = cpu_seconds()
        seconds = self._run()
        self.processor.append((cpu_seconds() - before) / self._gigabytes)
        return self._gigabytes / seconds


def _lacking() -> str | None:
    """What is not installed."""
    if shutil.which("s3s-fs") is None:
        return "s3s-fs is not installed"
    try:
        import boto3  # noqa: F401
    except ImportError:
        return "boto3 is not installed"
    return None


@contextmanager
def _server(place: Path) -> Iterator[str]:
    """An S3 server over a directory; gives its endpoint."""
    (place / _BUCKET).mkdir()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    keys = ("--access-key", _KEYS["access_key_id"], "--secret-key", _KEYS["secret_access_key"])
    process = subprocess.Popen(
        ["s3s-fs", "--host", "127.0.0.1", "--port", port, *keys, place],  # noqa: S607
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        end = time.monotonic() + _BEGIN_S
        while True:
            try:
                socket.create_connection(("127.0.0.1", int(port)), 1).close()
                break
            except OSError:
                if time.monotonic() > end or process.poll() is not None:
                    raise TierError("s3s-fs does not begin") from None
                time.sleep(0.05)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()


def _tier(endpoint: str) -> dict[str, Any]:
    return {
        "type": "object",
        "url": f"s3://{_BUCKET}/tier",
        "endpoint": endpoint,
        "allow_http": True,
        "region": "us-east-1",
        "connections": _CONNECTIONS,
        **_KEYS,
    }


class _Boto3:
    """The same chunks by boto3, on as many threads as the tier has connections."""

    def __init__(self, endpoint: str, chunk_bytes: int, count: int) -> None:
        import boto3
        from botocore.config import Config

        self._client: Any = boto3.client(
            "s3",
            endpoint_url=endpoint,
            region_name="us-east-1",
            aws_access_key_id=_KEYS["access_key_id"],
            aws_secret_access_key=_KEYS["secret_access_key"],
            config=Config(max_pool_connections=_CONNECTIONS),
        )
        self._rows = np.ones((count, chunk_bytes), np.uint8)

    def store(self) -> float:
        return self._each(self._put)

    def load(self) -> float:
        return self._each(self._get)

    def _put(self, number: int) -> None:
        body = memoryview(self._rows[number])
        self._client.put_object(Bucket=_BUCKET, Key=f"boto3/{number}", Body=bytes(body))

    def _get(self, number: int) -> None:
        body = self._client.get_object(Bucket=_BUCKET, Key=f"boto3/{number}")["Body"]
        rest = memoryview(self._rows[number])
        while got := body.readinto(rest):
            rest = rest[got:]

    def _each(self, run: Callable[[int], None]) -> float:
        with ThreadPoolExecutor(_CONNECTIONS) as threads:
            began = time.perf_counter()
            list(threads.map(run, range(len(self._rows))))
            return time.perf_counter() - began
