"""`make test` has no distribution to test; `make test-release` does, and names its folder."""

from __future__ import annotations

import os

collect_ignore_glob = [] if "KVTIER_DIST" in os.environ else ["test_*.py"]
