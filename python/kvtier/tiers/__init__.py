"""Tiers written in Python: the contract, the registry, and the thread that each one runs on.

`docs/tiers.md` teaches writing one.
"""

from __future__ import annotations

from kvtier._kvtier import TierJob
from kvtier.tiers.contract import JobResult, SecondaryTier, TierContext, TierUsage
from kvtier.tiers.registry import register_tier

__all__ = [
    "JobResult",
    "SecondaryTier",
    "TierContext",
    "TierJob",
    "TierUsage",
    "register_tier",
]
