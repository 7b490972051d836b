from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

Write = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Writes requests (lists of block ids) as a trace and gives its path."""

    def write_trace(requests: Iterable[list[int]], name: str = "small.jsonl") -> Path:
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        lines = (
            json.dumps(
                {
                    "timestamp": number * 1000,
                    "input_length": 512 * len(blocks),
                    "output_length": 1,
                    "hash_ids": blocks,
                }
            )
            for number, blocks in enumerate(requests)
        )
        path.write_text("".join(f"{line}\n" for line in lines))
        return path

    return write_trace


@pytest.fixture
def chats() -> list[list[int]]:
    """20 chats whose turns continue their prefix and come in turn."""
    return [
        [session * 100 + block for block in range(3 * turn)]
        for turn in range(1, 6)
        for session in range(20)
    ]


@pytest.fixture(scope="session")
def conversation() -> Path:
    """The Mooncake conversation trace, which is not part of the repository."""
    path = Path(__file__).parents[3] / "shared" / "traces" / "conversation_trace.jsonl"
    if not path.is_file():
        pytest.skip(f"{path} is not there")
    return path
