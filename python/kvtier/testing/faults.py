"""A tier that goes wrong on purpose, around one that does not."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["faulty"]


def faulty(
    inner: Mapping[str, Any],
    *,
    seed: int = 0,
    latency_s: float = 0.0,
    reorder: bool = False,
    loss: float = 0.0,
    partial: float = 0.0,
    corrupt: float = 0.0,
    full: float = 0.0,
    hang: float = 0.0,
    panic: float = 0.0,
    retry: float = 0.0,
    lie: float = 0.0,
    crash_after: int | None = None,
    **fields: Any,
) -> dict[str, Any]:
    """Gives the settings of a tier that does what `inner` does, and fails as it is told.

    Rates are from 0 to 1; what happens to a job is drawn from `seed` and the job's number alone,
    so a run is repeated by its seed. `fields` are those that every tier takes, and not taken
    from `inner`.

    - `latency_s`: seconds that every job takes longer; with `reorder`, up to twice as many, so
      that jobs end in another order than they began
    - `loss`: jobs that are dropped without a report; `hang`: jobs that do not end before the tier
      is shut down
    - `partial`: chunks that fail in jobs that go well otherwise; `corrupt`: chunks that come back
      with a flipped bit; `full`: stores that find no room
    - `panic`: calls that panic; `retry`: keys that the tier does not know of yet; `lie`: keys that
      it says it has, though it has not
    - `crash_after`: number of jobs after which it has nothing, takes nothing, and answers nothing

    `Manager` raises `ConfigError` for a rate that is none.
    """
    faults = {
        "seed": seed,
        "latency_s": latency_s,
        "reorder": reorder,
        "loss": loss,
        "partial": partial,
        "corrupt": corrupt,
        "full": full,
        "hang": hang,
        "panic": panic,
        "retry": retry,
        "lie": lie,
        "crash_after": crash_after,
    }
    return {"type": "faulty", "inner": dict(inner), "faults": faults, **fields}
