"""A file tier to measure."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kvtier import Region
from kvtier.bench.tier_store import TierStore, tier_store

__all__ = ["file_store"]

# What a store needs beside its chunks: 128 bytes of header a chunk, and less than this.
_OWN_BYTES = 8 << 20


@contextmanager
def file_store(
    directory: Path, chunk_bytes: int, size: int, region: Region | None = None, **settings: Any
) -> Iterator[TierStore]:
    """A file tier in `directory` with room for `size` bytes of chunks, closed at the end."""
    count = max(1, size // chunk_bytes)
    config = {
        "type": "file",
        "path": directory,
        "capacity_bytes": count * (chunk_bytes + 200) + _OWN_BYTES,
        **settings,
    }
    with tier_store(config, chunk_bytes, size, region) as store:
        yield store
