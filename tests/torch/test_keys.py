import hashlib
import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.errors import ConfigError
from kvtier.keys import hash_blocks, make_offload_key

TOKENS = st.lists(st.integers(0, 2**31), max_size=60)
SIZES = st.integers(1, 9)


@given(st.binary(min_size=4, max_size=60), st.integers(0, 2**32 - 1))
def test_key_is_the_hash_and_the_group(block_hash: bytes, group: int) -> None:
    key = make_offload_key(block_hash, group)
    assert key[: len(block_hash)] == block_hash
    assert struct.unpack("<I", key[len(block_hash) :]) == (group,)


@pytest.mark.parametrize(("size", "group"), [(3, 0), (61, 0), (32, -1), (32, 2**32)])
def test_impossible_keys_are_refused(size: int, group: int) -> None:
    with pytest.raises(ConfigError):
        make_offload_key(bytes(size), group)


@given(TOKENS, SIZES, st.binary(max_size=8))
def test_hashes_follow_the_definition(tokens: list[int], size: int, seed: bytes) -> None:
    digest, expected = hashlib.sha256(seed).digest(), []
    for block in range(len(tokens) // size):
        part = tokens[block * size : (block + 1) * size]
        digest = hashlib.sha256(digest + struct.pack(f"<{size}q", *part)).digest()
        expected.append(digest)
    assert hash_blocks(tokens, size, seed=seed) == expected


@given(TOKENS, SIZES, st.data())
def test_a_prefix_can_be_continued(tokens: list[int], size: int, data: st.DataObject) -> None:
    whole = hash_blocks(tokens, size)
    if not whole:
        return
    at = data.draw(st.integers(1, len(whole)))
    assert hash_blocks(tokens[at * size :], size, parent=whole[at - 1]) == whole[at:]


@given(st.lists(st.integers(0, 300), min_size=1, max_size=60), SIZES, st.data())
def test_one_other_token_changes_its_block_and_all_behind(
    tokens: list[int], size: int, data: st.DataObject
) -> None:
    at = data.draw(st.integers(0, len(tokens) - 1))
    other = [*tokens[:at], tokens[at] + 1, *tokens[at + 1 :]]
    before, after = hash_blocks(tokens, size), hash_blocks(other, size)
    for block, (left, right) in enumerate(zip(before, after, strict=True)):
        assert (left == right) == (block < at // size)


def test_the_type_of_the_numbers_does_not_matter() -> None:
    tokens = list(range(40))
    expected = hash_blocks(tokens, 16)
    assert len(expected) == 2
    for dtype in (np.uint8, np.int32, np.int64, ">i8"):
        assert hash_blocks(np.array(tokens, dtype), 16) == expected
    assert hash_blocks(tokens, 16, seed=b"tenant") != expected


@pytest.mark.parametrize("tokens", [[1.5, 2.0], [[1, 2], [3, 4]], ["a", "b"]])
def test_what_are_no_tokens_is_refused(tokens: list[int]) -> None:
    with pytest.raises(ConfigError, match="list of integers"):
        hash_blocks(tokens, 1)
    with pytest.raises(ConfigError, match="block_size 0"):
        hash_blocks([1], 0)
