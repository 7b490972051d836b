"""Tests for tiers: those of kvtier, and yours.

`TierConformance` is a suite for pytest. Importing this package does not import pytest.
"""

from __future__ import annotations

import sys

if "pytest" in sys.modules:
    # So that a failed assert of the suite tells the values.
    sys.modules["pytest"].register_assert_rewrite("kvtier.testing.conformance")

from kvtier.testing.conformance import TierConformance

__all__ = ["TierConformance"]
