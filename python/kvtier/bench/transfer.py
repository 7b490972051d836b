"""Paged KV cache to slots of the primary region and back, and the block tables beside it."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from kvtier.bench.block_tables import measure_tables
from kvtier.bench.cuda_transfer import measure_cuda
from kvtier.bench.figures import Figure
from kvtier.bench.host_transfer import measure_host
from kvtier.errors import ConfigError

__all__ = ["measure"]


def measure(*, device: str, size: int, rounds: int) -> Iterator[Figure]:
    """Yields the figures of `device` for transfers of `size` bytes.

    Raises `ConfigError` where there is no such device.
    """
    if device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device cuda: this machine has no usable GPU; use --device cpu")
    yield from (measure_cuda if device == "cuda" else measure_host)(size, rounds)
    yield from measure_tables(device, rounds)
