from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import kvtier.testing


class TestMemoryTier(kvtier.testing.TierConformance):
    recency = True

    def config(self, path: Path, capacity_bytes: int) -> Mapping[str, Any]:  # noqa: ARG002
        return {"type": "memory", "capacity_bytes": capacity_bytes}


class TestFileTier(kvtier.testing.TierConformance):
    persistent = True
    recency = True

    def config(self, path: Path, capacity_bytes: int) -> Mapping[str, Any]:
        return {"type": "file", "path": path, "capacity_bytes": capacity_bytes}

    def damage(self, path: Path) -> None:
        for file in path.glob("chunks/*/*.kv"):
            raw = bytearray(file.read_bytes())
            raw[-1] ^= 1
            file.write_bytes(raw)
