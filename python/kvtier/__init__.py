"""kvtier keeps the KV cache of LLM inference in tiers.

GPU blocks, host memory (the primary tier), and files or network stores (secondary tiers): a
chunk of KV cache that was computed once is brought back faster than it can be recomputed.

`Region` and `Manager` are the core, written in Rust; `kvtier.torch` binds them to torch
tensors; `kvtier.tiers` is for tiers written in Python, `kvtier.testing` tests tiers;
`kvtier.config` lists every setting and every figure. Importing this package starts
nothing and does not import torch.
"""

from __future__ import annotations

import warnings

import kvtier._interpreter  # noqa: F401 - refuses what kvtier does not run on
from kvtier import errors
from kvtier._kvtier import (
    HIT,
    HIT_PENDING,
    LATENCY_BUCKETS,
    MISS,
    RETRY,
    HostCopier,
    Manager,
    Moves,
    PreparedStore,
    Region,
    __version__,
    build_profile,
)
from kvtier.errors import KvTierError
from kvtier.keys import hash_blocks, make_offload_key
from kvtier.tiers import (
    JobResult,
    SecondaryTier,
    TierContext,
    TierJob,
    TierUsage,
    register_tier,
)

__all__ = [
    "HIT",
    "HIT_PENDING",
    "LATENCY_BUCKETS",
    "MISS",
    "RETRY",
    "HostCopier",
    "JobResult",
    "KvTierError",
    "Manager",
    "Moves",
    "PreparedStore",
    "Region",
    "SecondaryTier",
    "TierContext",
    "TierJob",
    "TierUsage",
    "__version__",
    "errors",
    "hash_blocks",
    "make_offload_key",
    "register_tier",
]

if build_profile == "debug":
    warnings.warn(
        "kvtier's extension is a debug build, many times slower: build it with "
        "`maturin develop --release`",
        RuntimeWarning,
        stacklevel=2,
    )
