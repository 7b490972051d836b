from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier.demo.options import DemoOptions, DemoSizes, ModelSizes
from kvtier.demo.workload import make_workload
from kvtier.errors import ConfigError


@settings(deadline=None, max_examples=25)
@given(st.integers(1, 60), st.integers(1, 4), st.integers(0, 3))
def test_turns_grow_their_sessions_prefix(sessions: int, turns: int, seed: int) -> None:
    work = make_workload(sessions, turns, 300, seed=seed)
    assert work == make_workload(sessions, turns, 300, seed=seed)
    assert sorted(work.order) == [(s, t) for s in range(sessions) for t in range(turns)]
    first = [work.prompt(session, 0, []) for session in range(sessions)]
    assert len({tuple(prompt) for prompt in first}) == sessions
    shared = 1 + len(work.system)
    assert len({tuple(prompt[:shared]) for prompt in first}) == 1
    replies = [[turn, 7, 9] for turn in range(turns)]
    for session in range(min(sessions, 3)):
        before: list[int] = []
        for turn in range(turns):
            prompt = work.prompt(session, turn, replies[:turn])
            assert prompt[: len(before)] == before
            assert len(prompt) + 3 <= work.longest_turn_tokens(3)
            before = prompt + replies[turn]


def test_a_session_comes_back_after_others() -> None:
    order = make_workload(6, 3, 300).order
    for session in range(6):
        at = [place for place, (who, _) in enumerate(order) if who == session]
        assert [order[place][1] for place in at] == [0, 1, 2]
        assert all(later - sooner >= 4 for sooner, later in pairwise(at))


def test_own_texts(tmp_path: Path) -> None:
    long, short = tmp_path / "long.txt", tmp_path / "short.txt"
    long.write_bytes(bytes(range(256)) * 4)
    short.write_bytes(b"short")
    (tmp_path / "empty.txt").touch()
    work = make_workload(3, 2, 500, texts=[long])
    assert len({chat.messages for chat in work.chats}) == 3
    assert bytes(range(256)) in work.chats[0].messages[0]
    for name, complaint in (
        ("short.txt", "has only 5 bytes, but 660 bytes are needed"),
        ("empty.txt", "is empty"),
        ("none.txt", "No such file"),
        (".", "Is a directory"),
    ):
        with pytest.raises(ConfigError, match=complaint):
            make_workload(3, 2, 500, texts=[long, tmp_path / name])


def test_default_pools_follow_the_session() -> None:
    options = DemoOptions()
    sizes = DemoSizes.of(options, 3200, 8000)
    assert sizes.session_blocks == 200
    assert sizes.gpu_blocks == 400
    assert sizes.host_slots == 8000 // 128
    assert sizes.disk_bytes > 6 * 25 * (options.chunk_bytes + 4096)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"gpu_blocks": 199}, r"one session needs 200: use --gpu-blocks 200 or --gpu-pool 19MiB"),
        ({"gpu_bytes": 2**20}, r"the GPU pool has 10 blocks"),
        ({"host_bytes": 4096}, r"--host of 4096 bytes is smaller than one chunk of 786432"),
        ({"disk_bytes": 4096}, r"--disk of 4096 bytes is smaller than one chunk of 851968"),
    ],
)
def test_pools_that_are_too_small(change: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        DemoSizes.of(DemoOptions(**change), 3200, 8000)


@pytest.mark.parametrize(
    "change",
    [{"heads": 3}, {"heads": 8, "kv_heads": 3}, {"layers": 0}, {"d_model": 8, "heads": 8}],
)
def test_impossible_models(change: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match="--"):
        ModelSizes(**change)
