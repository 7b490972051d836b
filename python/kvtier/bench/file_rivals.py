"""What the file tier is measured beside: fio, and vLLM's file system tier where it is installed."""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from kvtier.bench.beside_vllm import import_vllm
from kvtier.errors import TierError

__all__ = ["DEPTH", "Fio", "VllmTier", "vllm_tier"]

# Transfers under way at once, everywhere.
DEPTH = 32
_MODULES = {
    "io": "vllm.v1.kv_offload.tiering.fs.io",
    "pools": "vllm.v1.kv_offload.tiering.fs.thread_pool",
}


class Fio:
    """fio with O_DIRECT and io_uring on a file of its own, one run a round."""

    def __init__(self, directory: Path, block: int, size: int) -> None:
        self._command = [
            *("fio", "--name=kvtier", f"--filename={directory / 'fio'}", f"--bs={block}"),
            *(f"--size={size}", f"--iodepth={DEPTH}", "--ioengine=io_uring", "--direct=1"),
            *("--thread", "--fixedbufs", "--output-format=json"),
        ]

    @staticmethod
    def is_installed() -> bool:
        """Whether there is a fio to run."""
        return shutil.which("fio") is not None

    def rate(self, verb: str) -> float:
        """Writes or reads the whole file; returns GB/s."""
        done = subprocess.run(
            [*self._command, f"--rw={verb}"], capture_output=True, text=True, check=False
        )
        if done.returncode != 0:
            raise TierError(f"fio: {done.stderr.strip()}")
        # fio may print warnings before its object.
        report = json.loads(done.stdout[done.stdout.index("{") :])
        return float(report["jobs"][0][verb]["bw_bytes"]) / 1e9


class VllmTier:
    """The threads and the I/O of vLLM's file system tier, with its layout of files."""

    def __init__(self, vllm: SimpleNamespace, directory: Path, block: int, size: int) -> None:
        self._store_batch: Callable[..., Any] = vllm.io.batch_store_block
        self._load_batch: Callable[..., Any] = vllm.io.batch_load_block
        self._direct = bool(vllm.io.probe_o_direct(str(directory)))
        self._pool = vllm.pools.DualQueueThreadPool(16, 16, thread_name_prefix="vllm")
        self._directory, self._block, self._count = directory, block, size // block
        rows = np.zeros((self._count + 1, block), np.uint8)
        # Aligned, as vLLM's own region is.
        skip = -rows.ctypes.data % 4096
        aligned: Any = rows.reshape(-1)[skip : skip + self._count * block]
        self._view = memoryview(aligned)
        self._round = self._job = 0

    def store(self) -> float:
        """Writes a file a chunk; returns the seconds. The last round's files are removed before."""
        self.remove()
        self._round += 1
        return self._run(self._pool.enqueue_store, self._store_batch)

    def load(self) -> float:
        """Reads the files of the last round; returns the seconds."""
        return self._run(self._pool.enqueue_load, self._load_batch)

    def remove(self) -> None:
        """Removes the files of the last round."""
        shutil.rmtree(self._root, ignore_errors=True)

    def close(self) -> None:
        """Ends the threads and removes the files."""
        self._pool.shutdown(wait=True)
        self.remove()

    @property
    def _root(self) -> Path:
        return self._directory / f"vllm-{self._round}"

    def _run(self, enqueue: Callable[..., None], move: Callable[..., Any]) -> float:
        began = time.perf_counter()
        for chunks in np.array_split(np.arange(self._count), min(DEPTH, self._count)):
            self._job += 1
            enqueue(self._job, 1, [lambda chunks=chunks: self._move(move, chunks)])
        self._pool.wait_idle()
        seconds = time.perf_counter() - began
        failed = [job for job, good, _ in self._pool.get_finished() if not good]
        if failed:
            raise TierError(f"{len(failed)} jobs of vLLM's tier failed")
        return seconds

    def _move(self, move: Callable[..., Any], chunks: Any) -> None:
        paths = [str(self._path(int(chunk))) for chunk in chunks]
        offsets = [int(chunk) * self._block for chunk in chunks]
        move(paths, self._view, offsets, self._block, self._direct)

    def _path(self, chunk: int) -> Path:
        # As its FileMapper: two levels of directories, by the key's hash.
        name = f"{(chunk * 0x9E3779B97F4A7C15) % 2**64:016x}"
        return self._root / name[:3] / f"{name[3:5]}_g0" / f"{name}.bin"


@contextlib.contextmanager
def vllm_tier(directory: Path, block: int, size: int) -> Iterator[VllmTier | None]:
    """The tier of vLLM, closed at the end; None where vLLM is not installed."""
    vllm = import_vllm(_MODULES)
    if vllm is None:
        yield None
        return
    tier = VllmTier(vllm, directory, block, size)
    try:
        yield tier
    finally:
        tier.close()
