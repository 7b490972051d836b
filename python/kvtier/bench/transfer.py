"""Paged KV cache to slots of the primary region and back, beside plain copies of the same size."""

from __future__ import annotations

from collections.abc import Iterator

from kvtier.bench.figures import Figure
from kvtier.bench.host_transfer import measure_host
from kvtier.errors import ConfigError

__all__ = ["measure"]


def measure(*, device: str, size: int, rounds: int) -> Iterator[Figure]:
    """Yields the figures of `device` for transfers of `size` bytes."""
    if device != "cpu":
        raise ConfigError(f"--device {device}: transfers are measured on cpu")
    return measure_host(size, rounds)
