"""What a run of the demo found, turn by turn and in total."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

__all__ = ["CopyTotals", "DemoReport", "TurnRecord"]

LONG_CONTEXT_TOKENS = 2000
"""Turns with less context say little about the gain, so the median leaves them out."""


@dataclass(frozen=True)
class TurnRecord:
    """One turn of one session. The recomputed half is `None` where nothing was reused."""

    session: int
    turn: int
    context_tokens: int
    """Tokens of the prompt."""
    reused: dict[str, int]
    """Tokens taken from "gpu", "primary" and every tier by its name; in whole chunks."""
    ttft_restored_s: float
    """Until the first token, with lookup, promotion, load and prefill of the tail."""
    chunks_not_stored: int = 0
    """New chunks that host memory had no room for in time."""
    ttft_recomputed_s: float | None = None
    tokens_equal: bool | None = None
    bytes_equal: bool | None = None
    difference: str | None = None
    """What differs, and where, when the restored turn is not the recomputed one."""

    @property
    def ratio(self) -> float | None:
        """Time to first token, recomputed over restored."""
        if self.ttft_recomputed_s is None:
            return None
        return self.ttft_recomputed_s / self.ttft_restored_s

    def as_json(self) -> dict[str, Any]:
        """The turn as in `kvtier demo --json`."""
        return {
            "session": self.session,
            "turn": self.turn,
            "context_tokens": self.context_tokens,
            "reused": self.reused,
            "ttft_restored_s": self.ttft_restored_s,
            "ttft_recomputed_s": self.ttft_recomputed_s,
            "ratio": self.ratio,
            "tokens_equal": self.tokens_equal,
            "bytes_equal": self.bytes_equal,
            "difference": self.difference,
            "chunks_not_stored": self.chunks_not_stored,
        }


@dataclass
class CopyTotals:
    """Bytes between the GPU pool and host memory in one direction, and the time they took."""

    bytes: int = 0
    seconds: float = 0.0

    def add(self, size: int, seconds: float) -> None:
        """Counts one job."""
        self.bytes += size
        self.seconds += seconds


@dataclass(frozen=True)
class DemoReport:
    """The whole run. `stats` is `Manager.stats()` at its end, `gpu` the block pool's counters."""

    turns: list[TurnRecord]
    stats: dict[str, Any]
    gpu: dict[str, int]
    stored: CopyTotals
    loaded: CopyTotals
    directory: Path | None
    """Where the store is; `None` when it was a temporary directory, gone by now."""
    warm_chunks: int
    """Chunks that the store held before the run."""
    chunk_tokens: int
    seconds: float
    setting: dict[str, Any] = field(default_factory=dict)
    """Sizes of the run, for the reader."""

    @property
    def warm_start(self) -> bool:
        """Whether the store held chunks of an earlier run."""
        return self.warm_chunks > 0

    @property
    def tokens_equal(self) -> bool:
        """Whether no recomputed turn gave other tokens."""
        return all(turn.tokens_equal is not False for turn in self.turns)

    @property
    def bytes_equal(self) -> bool:
        """Whether no recomputed turn gave other bytes in the KV cache."""
        return all(turn.bytes_equal is not False for turn in self.turns)

    @property
    def differences(self) -> list[str]:
        """One line for every turn that came out different."""
        return [turn.difference for turn in self.turns if turn.difference is not None]

    @property
    def ratio_median(self) -> float | None:
        """Median ratio of returning turns with a long context; `None` without any."""
        ratios = [
            turn.ratio
            for turn in self.turns
            if turn.turn > 0
            and turn.ratio is not None
            and turn.context_tokens >= LONG_CONTEXT_TOKENS
        ]
        return statistics.median(ratios) if ratios else None

    def reused(self, source: str) -> int:
        """Tokens that all turns together took from `source`."""
        return sum(turn.reused.get(source, 0) for turn in self.turns)

    def as_json(self) -> dict[str, Any]:
        """The object that `kvtier demo --json` prints."""
        return {
            "turns": [turn.as_json() for turn in self.turns],
            "tokens_equal": self.tokens_equal,
            "bytes_equal": self.bytes_equal,
            "differences": self.differences,
            "ratio_median": self.ratio_median,
            "tiers": {"primary": self.stats["primary"], **self.stats["tiers"]},
            "gpu": self.gpu,
            "stored": {"bytes": self.stored.bytes, "seconds": self.stored.seconds},
            "loaded": {"bytes": self.loaded.bytes, "seconds": self.loaded.seconds},
            "warm_start": self.warm_start,
            "warm_chunks": self.warm_chunks,
            "directory": None if self.directory is None else str(self.directory),
            "seconds": self.seconds,
            "setting": self.setting,
        }
