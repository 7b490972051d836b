"""What a run of the demo is asked to do, and the sizes that follow from it.

Free of torch, so that the command line can refuse a run before anything heavy is imported.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from kvtier.errors import ConfigError

__all__ = ["DemoOptions", "DemoSizes", "ModelSizes", "default_threads"]

# What the file tier's own files take in a small store, cautiously.
_STORE_BYTES = 64 << 10


@dataclass(frozen=True)
class ModelSizes:
    """Size of the decoder; head_dim is `d_model / heads`, weights and KV are float32."""

    layers: int = 6
    d_model: int = 512
    heads: int = 8
    kv_heads: int = 2

    def __post_init__(self) -> None:
        """Raises `ConfigError` for sizes that make no decoder."""
        for name in ("layers", "d_model", "heads", "kv_heads"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{_flag(name)} {getattr(self, name)}: it must be 1 or more")
        if self.d_model % (2 * self.heads):
            raise ConfigError(
                f"--d-model {self.d_model} with --heads {self.heads}: the size of a head must be "
                f"an even number; use a multiple of {2 * self.heads}"
            )
        if self.heads % self.kv_heads:
            raise ConfigError(
                f"--heads {self.heads} with --kv-heads {self.kv_heads}: heads must be a multiple "
                f"of KV heads"
            )

    @property
    def head_dim(self) -> int:
        """Elements of one head."""
        return self.d_model // self.heads

    @property
    def ffn(self) -> int:
        """Width of the feed-forward layer: 8/3 of the model, rounded up to 128."""
        return -(-self.d_model * 8 // (3 * 128)) * 128

    @property
    def kv_bytes_per_token(self) -> int:
        """Keys and values of every layer, float32."""
        return self.layers * 2 * self.kv_heads * self.head_dim * 4


@dataclass(frozen=True)
class DemoOptions:
    """One run of the demo; sizes in bytes, `None` where a default follows from the others."""

    sessions: int = 6
    turns: int = 3
    new_tokens: int = 16
    context_tokens: int = 2048
    block_size: int = 16
    blocks_per_chunk: int = 8
    model: ModelSizes = ModelSizes()
    gpu_blocks: int | None = None
    gpu_bytes: int | None = None
    host_bytes: int | None = None
    disk_bytes: int | None = None
    directory: Path | None = None
    device: Literal["cpu", "cuda"] = "cpu"
    seed: int = 0
    texts: tuple[Path, ...] = ()
    threads: int | None = None

    def __post_init__(self) -> None:
        """Raises `ConfigError` for a count below 1."""
        for name in (
            "sessions",
            "turns",
            "new_tokens",
            "context_tokens",
            "block_size",
            "blocks_per_chunk",
        ):
            if getattr(self, name) < 1:
                raise ConfigError(f"{_flag(name)} {getattr(self, name)}: it must be 1 or more")
        if self.threads is not None and self.threads < 1:
            raise ConfigError(f"--threads {self.threads}: it must be 1 or more")
        if self.seed < 0:
            raise ConfigError(f"--seed {self.seed}: it must be 0 or more")

    @property
    def chunk_tokens(self) -> int:
        """Tokens of one chunk, which is also the prefill tile."""
        return self.block_size * self.blocks_per_chunk

    @property
    def block_bytes(self) -> int:
        """KV bytes of one block of every layer."""
        return self.block_size * self.model.kv_bytes_per_token

    @property
    def chunk_bytes(self) -> int:
        """KV bytes of one chunk."""
        return self.blocks_per_chunk * self.block_bytes


@dataclass(frozen=True)
class DemoSizes:
    """Pool sizes of a run, with every default filled in."""

    session_blocks: int
    """Blocks that the longest turn needs."""
    gpu_blocks: int
    host_slots: int
    disk_bytes: int

    @classmethod
    def of(cls, options: DemoOptions, longest_turn_tokens: int, host_tokens: int) -> DemoSizes:
        """Fills the defaults in for turns of up to `longest_turn_tokens` tokens.

        The GPU pool holds about two sessions, host memory `host_tokens`, the disk all. Raises
        `ConfigError` when a pool is too small to work at all.
        """
        session_blocks = -(-longest_turn_tokens // options.block_size)
        session_bytes = session_blocks * options.block_bytes
        gpu_blocks = options.gpu_blocks
        if gpu_blocks is None and options.gpu_bytes is not None:
            gpu_blocks = options.gpu_bytes // options.block_bytes
        if gpu_blocks is None:
            gpu_blocks = session_blocks * min(2, max(1, options.sessions // 3))
        if gpu_blocks < session_blocks:
            raise ConfigError(
                f"the GPU pool has {gpu_blocks} blocks, but one session needs {session_blocks}: "
                f"use --gpu-blocks {session_blocks} or --gpu-pool "
                f"{-(-session_bytes // 2**20)}MiB or more"
            )
        # A slot is rounded up to whole pages of 4096 bytes.
        slot_bytes = -(-options.chunk_bytes // 4096) * 4096
        host_bytes = options.host_bytes
        if host_bytes is None:
            host_bytes = max(2, host_tokens // options.chunk_tokens) * slot_bytes
        disk_bytes = options.disk_bytes
        if disk_bytes is None:
            session_chunks = -(-session_blocks // options.blocks_per_chunk)
            disk_bytes = options.sessions * session_chunks * (slot_bytes + 4096) + _STORE_BYTES
        for flag, given, needed in (
            ("--host", host_bytes, slot_bytes),
            ("--disk", disk_bytes, slot_bytes + _STORE_BYTES),
        ):
            if given < needed:
                raise ConfigError(
                    f"{flag} of {given} bytes is smaller than one chunk of {needed} bytes: give "
                    f"more, or make chunks smaller with --blocks-per-chunk"
                )
        return cls(session_blocks, gpu_blocks, host_bytes // slot_bytes, disk_bytes)


def default_threads() -> int:
    """CPUs that this process may use: its affinity, and the CPU quota of its cgroup."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    cpus = count or 1
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
    except (OSError, ValueError):
        return cpus
    if quota == "max":
        return cpus
    return max(1, min(cpus, int(quota) // int(period)))


def _flag(name: str) -> str:
    return "--" + {"context_tokens": "context"}.get(name, name).replace("_", "-")
