"""Tests for tiers: those of kvtier, and yours; and a tier that fails, for tests of engines.

`TierConformance` is a suite for pytest; `faulty` puts faults in front of any tier. Importing this
package does not import pytest.
"""

from __future__ import annotations

import sys

if "pytest" in sys.modules:
    # So that a failed assert of the suite tells the values.
    sys.modules["pytest"].register_assert_rewrite("kvtier.testing.conformance")

from kvtier.testing.conformance import TierConformance
from kvtier.testing.faults import faulty

__all__ = ["TierConformance", "faulty"]
