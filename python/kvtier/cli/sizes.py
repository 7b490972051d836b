"""Sizes as people write and read them: 64MiB, 1GB, 512k."""

from __future__ import annotations

import argparse
import math
import re

__all__ = ["format_size", "parse_size"]

_UNITS = {"": 1}
_UNITS |= {f"{prefix}b": 1000**power for power, prefix in enumerate("kmgt", 1)}
_UNITS |= {f"{prefix}ib": 1024**power for power, prefix in enumerate("kmgt", 1)}
_UNITS |= {prefix: 1024**power for power, prefix in enumerate("kmgt", 1)}
_UNITS["b"] = 1

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([a-z]*)", re.IGNORECASE)


def parse_size(text: str) -> int:
    """Bytes of `text`: kB, MB ... are powers of 1000, KiB, MiB ... and K, M ... of 1024.

    Raises `argparse.ArgumentTypeError`, so that it can be an argument's type.
    """
    match = _SIZE.fullmatch(text.strip())
    factor = _UNITS.get(match[2].lower()) if match else None
    if match is None or factor is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size; write 64MiB or 1GB")
    size = float(match[1]) * factor
    if not 1 <= size < math.inf:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no size to work with; it must be above 0 and finite"
        )
    return int(size)


def format_size(size: float) -> str:
    """`size` bytes in the largest binary unit that leaves a figure of 1 or more."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" or size >= 100 else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"
