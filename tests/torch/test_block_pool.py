import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvtier.errors import ConfigError, KeyStateError, PoolExhaustedError
from kvtier.torch import BlockPool

BLOCKS = 7


def chain(name: int, length: int) -> list[bytes]:
    """The hashes of a prompt; prompts of one `name` share their prefix."""
    return [f"{name}/{depth}".encode() for depth in range(length)]


class PoolAgainstModel(RuleBasedStateMachine):
    """The pool against a naive model: plain lists, scanned for every question."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(BLOCKS)
        self.refs = [0] * BLOCKS
        self.content: list[bytes | None] = [None] * BLOCKS
        self.freed: list[int] = []  # cached and unreferenced, oldest first
        self.requests: list[list[int]] = []
        self.evictions = 0

    @rule(count=st.integers(0, BLOCKS + 1))
    def allocate(self, count: int) -> None:
        free = self.refs.count(0)
        if count > free:
            with pytest.raises(PoolExhaustedError, match=f"only {free} of {BLOCKS}"):
                self.pool.allocate(count)
            return
        blank = free - len(self.freed)
        evicted, self.freed = (
            self.freed[: max(0, count - blank)],
            self.freed[max(0, count - blank) :],
        )
        got = self.pool.allocate(count)
        assert len(set(got)) == count
        assert set(evicted) <= set(got)
        for block in got:
            assert self.refs[block] == 0
            assert block not in self.freed
            self.refs[block] = 1
            self.content[block] = None
        self.evictions += len(evicted)
        self.requests.append(got)

    @rule(name=st.integers(0, 2), length=st.integers(0, 5))
    def match(self, name: int, length: int) -> None:
        expected = []
        for block_hash in chain(name, length):
            if block_hash not in self.content:
                break
            expected.append(self.content.index(block_hash))
        assert self.pool.match_prefix(chain(name, length)) == expected
        for block in expected:
            self.refs[block] += 1
            if block in self.freed:
                self.freed.remove(block)
        self.requests.append(expected)

    @precondition(lambda self: self.requests)
    @rule(data=st.data(), name=st.integers(0, 2))
    def publish(self, data: st.DataObject, name: int) -> None:
        request = data.draw(st.sampled_from(self.requests))
        hashes = chain(name, len(request))
        wrong = any(
            self.content[block] not in (None, block_hash)
            for block, block_hash in zip(request, hashes, strict=True)
        )
        if wrong:
            with pytest.raises(KeyStateError, match="already known"):
                self.pool.publish(request, hashes)
            return
        self.pool.publish(request, hashes)
        for block, block_hash in zip(request, hashes, strict=True):
            if block_hash not in self.content:
                self.content[block] = block_hash

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        request = self.requests.pop(data.draw(st.integers(0, len(self.requests) - 1)))
        self.pool.free(request)
        for block in reversed(request):
            self.refs[block] -= 1
            if self.refs[block] == 0 and self.content[block] is not None:
                self.freed.append(block)

    @invariant()
    def agrees(self) -> None:
        self.pool.validate()
        assert self.pool.num_free == self.refs.count(0)
        assert self.pool.num_cached == sum(known is not None for known in self.content)
        assert self.pool.stats.evictions == self.evictions


PoolAgainstModel.TestCase.settings = settings(
    max_examples=150, stateful_step_count=40, deadline=None
)
TestPoolAgainstModel = PoolAgainstModel.TestCase


def test_the_tail_of_a_request_is_evicted_before_its_head() -> None:
    pool = BlockPool(4)
    blocks = pool.allocate(4)
    pool.publish(blocks, chain(0, 4))
    pool.free(blocks)
    pool.allocate(1)
    assert pool.match_prefix(chain(0, 4)) == blocks[:3]
    assert pool.stats.evictions == 1
    assert (pool.stats.hits, pool.stats.misses, pool.stats.published) == (3, 1, 4)


def test_the_oldest_request_is_evicted_first() -> None:
    pool = BlockPool(4)
    for name in (0, 1):
        blocks = pool.allocate(2)
        pool.publish(blocks, chain(name, 2))
        pool.free(blocks)
    pool.free(pool.match_prefix(chain(0, 2)))  # used again: now session 1 is the oldest
    pool.allocate(2)
    assert len(pool.match_prefix(chain(0, 2))) == 2
    assert pool.match_prefix(chain(1, 2)) == []


def test_refused_calls_change_nothing() -> None:
    pool = BlockPool(3)
    held = pool.allocate(2)
    for bad in ([held[0], held[0]], [held[0], 2], [held[0], 9], [-1]):
        with pytest.raises(KeyStateError):
            pool.free(bad)
    with pytest.raises(KeyStateError, match="2 blocks, but 1 hashes"):
        pool.publish(held, chain(0, 1))
    with pytest.raises(KeyStateError):
        pool.publish([held[0], 2], chain(0, 2))
    assert pool.num_free == 1
    assert pool.num_cached == 0
    with pytest.raises(ConfigError):
        pool.allocate(-1)
    with pytest.raises(ConfigError):
        BlockPool(0)
    pool.validate()
