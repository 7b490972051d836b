"""Content-addressed keys: what a chunk is called, in every tier and on every machine.

A block's hash commits to its own tokens and to everything before them, so equal hashes mean
equal prefixes. A key is such a hash plus the index of the KV cache group it belongs to.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from kvtier.errors import ConfigError

__all__ = ["HASH_NAME", "MAX_KEY_BYTES", "MIN_KEY_BYTES", "hash_blocks", "make_offload_key"]

MIN_KEY_BYTES = 8
MAX_KEY_BYTES = 64
HASH_NAME = "sha256"
"""Name of the chained hash, for namespaces: another hash means other keys."""

_GROUP_BYTES = 4
_MAX_GROUP = 2**32 - 1


def make_offload_key(block_hash: bytes, group: int) -> bytes:
    """Returns `block_hash` followed by the group index as 4 little-endian bytes.

    Raises `ConfigError` when the key would not have 8 to 64 bytes, or when `group` does not
    fit into 4 bytes.
    """
    if not 0 <= group <= _MAX_GROUP:
        raise ConfigError(f"group {group} is out of range: it must be 0 to {_MAX_GROUP}")
    size = len(block_hash) + _GROUP_BYTES
    if not MIN_KEY_BYTES <= size <= MAX_KEY_BYTES:
        raise ConfigError(
            f"a key of {size} bytes is not possible: use a block hash of "
            f"{MIN_KEY_BYTES - _GROUP_BYTES} to {MAX_KEY_BYTES - _GROUP_BYTES} bytes, "
            f"not {len(block_hash)}"
        )
    return block_hash + struct.pack("<I", group)


def hash_blocks(
    tokens: Sequence[int] | NDArray[np.integer],
    block_size: int,
    *,
    seed: bytes = b"",
    parent: bytes | None = None,
) -> list[bytes]:
    """Returns the chained SHA-256 (32 bytes) of every full block of `block_size` tokens.

    The hash of a block covers the hash of the block before it and its own tokens, each as 8
    little-endian bytes; tokens behind the last full block are left out. The chain starts at
    `parent`, or at the hash of `seed` when there is none, so a prefix can be continued:
    `hash_blocks(t, b)[k:] == hash_blocks(t[k * b:], b, parent=hash_blocks(t, b)[k - 1])`.
    Callers that must not share blocks (tenants, adapters) give different seeds.

    Raises `ConfigError` for a block size below 1 or tokens that are not a list of integers.
    """
    if block_size < 1:
        raise ConfigError(f"block_size {block_size} is not possible: it must be 1 or more")
    values = np.asarray(tokens)
    if values.size == 0:
        return []
    if values.ndim != 1 or values.dtype.kind not in "iu":
        raise ConfigError(
            f"tokens must be one list of integers, not {values.dtype} of shape {values.shape}"
        )
    data = np.ascontiguousarray(values, dtype="<i8").tobytes()
    step = 8 * block_size
    digest = hashlib.sha256(seed).digest() if parent is None else parent
    hashes: list[bytes] = []
    for start in range(0, len(data) - step + 1, step):
        digest = hashlib.sha256(digest + data[start : start + step]).digest()
        hashes.append(digest)
    return hashes
