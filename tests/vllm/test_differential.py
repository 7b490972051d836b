"""Without room: prompts one after the other, through our managers and vLLM's.

Which chunk leaves is the policy's business, but least recently used is a rule that both have. So
with it the same requests in the same order must find the same chunks and evict the same ones.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.vllm.calls import SLOT, begin, chunk_of, keys_of
from tests.vllm.conftest import quiet_imports
from tests.vllm.test_mixing import disk, our_host, their_host

import kvtier

with quiet_imports():
    from vllm.v1.kv_offload.base import LookupResult
    from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager

    from kvtier.integrations.vllm.manager import KVTierOffloadingManager

SLOTS = 12
FEW = settings(
    max_examples=60,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


@st.composite
def prompts(draw: st.DrawFn) -> list[bytes]:
    """A prefix of one of a few texts."""
    return keys_of(draw(st.integers(1, SLOTS - 2)), prefix=draw(st.integers(0, 4)))


def serve(manager: Any, keys: Sequence[bytes]) -> tuple[int, Any]:
    """The length of the prefix that was found, and what was evicted for the rest."""
    context = begin(manager, keys)
    answers = [manager.lookup(key, context) for key in keys]
    found = [*answers, LookupResult.MISS].index(LookupResult.MISS)
    assert set(answers[:found]) <= {LookupResult.HIT}
    if found:
        manager.prepare_load(keys[:found], context)
        manager.complete_load(set(keys[:found]), context)
    prepared = manager.prepare_store(keys, context)
    evicted = None
    if prepared is not None:
        evicted = list(prepared.evicted_keys)
        manager.complete_store(set(prepared.keys_to_store), context)
    manager.on_request_finished(context)
    return found, evicted


@FEW
@given(st.lists(prompts(), min_size=5, max_size=40))
def test_host_memory_alone_hits_and_evicts_the_same(requests: list[list[bytes]]) -> None:
    inner = kvtier.Manager(kvtier.Region(SLOTS, SLOT), policy="lru")
    ours, theirs = KVTierOffloadingManager(inner), CPUOffloadingManager(SLOTS)
    for keys in requests:
        assert serve(ours, keys) == serve(theirs, keys)
        inner.validate()
    ours.shutdown()
    theirs.shutdown()


@pytest.mark.parametrize("slots", [SLOTS, 64])
@settings(FEW, max_examples=8)
@given(st.lists(st.tuples(prompts(), st.booleans()), min_size=3, max_size=12))
def test_a_tier_behind_brings_the_same_chunks_from_the_same_place(
    tmp_path_factory: pytest.TempPathFactory,
    slots: int,
    requests: list[tuple[list[bytes], bool]],
) -> None:
    """The same file tier under kvtier's manager and under `TieringOffloadingSpec`.

    Host memory is emptied now and then. When it is too small for all, the managers may evict
    chunks that a request has found already, for those that it waits for; which, nobody fixes.
    """
    directory: Callable[[str], Path] = tmp_path_factory.mktemp
    ours = our_host(slots, disk(directory("ours")) | {"load_share": 1.0}, eviction_policy="lru")
    with ours as mine, their_host(slots, disk(directory("theirs"))) as other:
        seen: set[bytes] = set()
        for keys, forget in requests:
            (chunks, sources), (their_chunks, their_sources) = mine.load(keys), other.load(keys)
            assert chunks == their_chunks == [chunk_of(key) for key in keys if key in seen]
            if slots > SLOTS:
                assert sources == their_sources
            for host in (mine, other):
                host.store(keys)
                host.end_step()
                if forget:
                    host.forget()
            seen.update(keys)
