"""vLLM's classes where vLLM is installed, and figures taken beside them.

A question that has vLLM as its reference yields each figure twice: `NAME` by itself, with its
limit, and, where vLLM can be imported, `NAME.vllm` with the ratio to it. Both are of the same
rounds.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from types import SimpleNamespace

from kvtier.bench.figures import Figure, compared
from kvtier.errors import InvariantError

__all__ = [
    "NOT_INSTALLED",
    "Batch",
    "alone_and_beside",
    "import_vllm",
    "numbered_hashes",
    "require",
]

Batch = list[bytes]

NOT_INSTALLED = "vllm is not installed, or not in a version that this question knows"


def import_vllm(modules: Mapping[str, str]) -> SimpleNamespace | None:
    """Modules of vLLM under short names; None where one can not be imported.

    What vLLM prints meanwhile goes to standard error.
    """
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    try:
        with contextlib.redirect_stdout(sys.stderr):
            return SimpleNamespace(
                **{name: importlib.import_module(path) for name, path in modules.items()}
            )
    except ImportError:
        return None


def numbered_hashes(first: int, count: int) -> Batch:
    """Keys as vLLM makes them, block hash and group index, of `first` to `first + count`."""
    return [
        hashlib.sha256(number.to_bytes(8, "little")).digest() + bytes(4)
        for number in range(first, first + count)
    ]


def alone_and_beside(
    name: str,
    unit: str,
    ours: Sequence[float],
    theirs: Sequence[float] | None,
    *,
    reference: str,
    limit: float | None = None,
    ratio_limit: float | None = None,
) -> Iterator[Figure]:
    """The figures `name` and, if there are rounds of `theirs`, `name.vllm`; smaller is better."""
    yield compared(name, unit, ours, target=limit, smaller_is_better=True)
    if theirs is not None:
        yield compared(
            f"{name}.vllm",
            unit,
            ours,
            reference=reference,
            theirs=theirs,
            target=ratio_limit,
            smaller_is_better=True,
        )


def require(served: bool) -> None:
    """Raises `InvariantError` unless the work was done: what was not done has no figure."""
    if not served:
        raise InvariantError("a side did not serve a request as it should: there is no figure")
