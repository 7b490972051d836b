"""Refuses an interpreter that kvtier was never tested on, before anything else is imported."""

from __future__ import annotations

import sys

if "t" in sys.abiflags:
    raise ImportError(
        f"kvtier does not support free-threaded Python ({sys.executable}): "
        "use the build of the same version that has the interpreter lock"
    )
