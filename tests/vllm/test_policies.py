"""kvtier's policies under vLLM's manager, beside vLLM's own."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
from tests.vllm.calls import begin, keys_of
from tests.vllm.conftest import quiet_imports

from kvtier._kvtier import POLICIES

with quiet_imports():
    from vllm.v1.kv_offload.base import LookupResult
    from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager

    from kvtier.integrations.vllm import policies

OURS = [name for name in policies.__all__ if name != "KVTierPolicy"]


def manager(policy: str, slots: int) -> Any:
    """vLLM's manager with one of our policies or of its own."""
    module = None if policy in ("lru", "arc") else "kvtier.integrations.vllm.policies"
    return CPUOffloadingManager(slots, policy, cache_policy_module_path=module)


class Served:
    """Requests served one after the other: what is resident is loaded, the rest stored."""

    def __init__(self, policy: str, slots: int) -> None:
        self.manager = manager(policy, slots)
        self.hits = 0

    def serve(self, keys: Sequence[bytes]) -> list[bytes] | None:
        """What was evicted for it; None if there was no room."""
        context = begin(self.manager, keys)
        here = [key for key in keys if self.manager.lookup(key, context) is LookupResult.HIT]
        self.hits += len(here)
        if here:
            self.manager.prepare_load(here, context)
            self.manager.complete_load(here, context)
        prepared = self.manager.prepare_store(keys, context)
        if prepared is not None:
            self.manager.complete_store(prepared.keys_to_store, context)
        self.manager.on_request_finished(context)
        return None if prepared is None else list(prepared.evicted_keys)

    def validate(self) -> None:
        policy = self.manager._policy
        if policy._evictor is not None:
            policy._evictor.validate()


def requests(seed: int, count: int = 400) -> list[list[bytes]]:
    """Prompts that share prefixes, some of which come back."""
    rng = random.Random(seed)
    return [keys_of(rng.randint(1, 12), prefix=rng.randrange(12)) for _ in range(count)]


def test_every_policy_has_a_class_of_its_own() -> None:
    assert sorted(getattr(policies, name).policy for name in OURS) == sorted(POLICIES)


@pytest.mark.parametrize("seed", range(6))
def test_lru_evicts_what_vllm_s_own_does(seed: int) -> None:
    """The same keys in the same order: the tail of what was used longest ago."""
    ours, theirs = Served("KVTierLRU", 40), Served("lru", 40)
    for keys in requests(seed):
        assert ours.serve(keys) == theirs.serve(keys)
        ours.validate()
    assert ours.hits == theirs.hits > 100


def test_arc_keeps_what_was_used_twice_as_vllm_s_own_does() -> None:
    """Its rules fix that; not how fast it learns from what it evicted."""
    for policy in ("KVTierARC", "arc"):
        served = Served(policy, 20)
        kept = keys_of(8, prefix=1)
        served.serve(kept)
        served.serve(kept)
        for number in range(2, 40):
            served.serve(keys_of(6, prefix=number))
        before = served.hits
        served.serve(kept)
        assert served.hits - before == len(kept)


@pytest.mark.parametrize("policy", OURS)
def test_the_manager_s_contract_holds_with_every_policy(policy: str) -> None:
    """Pinned and named chunks stay, as many go as must, a failed store leaves nothing."""
    slots = 24
    served = Served(policy, slots)
    rng = random.Random(1)
    loading: list[tuple[list[bytes], Any]] = []
    evictions = failures = 0
    for keys in requests(2):
        served.validate()
        context = begin(served.manager, keys)
        here = [key for key in keys if served.manager.lookup(key, context) is LookupResult.HIT]
        if here and len(loading) < 3:
            served.manager.prepare_load(here, context)
            loading.append((here, context))
        pinned = {key for held, _ in loading for key in held}
        prepared = served.manager.prepare_store(keys, context)
        if prepared is not None:
            gone = set(prepared.evicted_keys)
            evictions += len(gone)
            assert not gone & pinned
            assert not gone & set(keys)
            success = rng.random() < 0.9
            failures += not success
            served.manager.complete_store(prepared.keys_to_store, context, success)
            absent = {key for key in keys if served.manager.lookup(key, context).name == "MISS"}
            assert absent == (set() if success else set(prepared.keys_to_store))
        if loading and rng.random() < 0.5:
            held, owner = loading.pop(0)
            served.manager.complete_load(held, owner)
            served.manager.on_request_finished(owner)
    assert evictions > 100
    assert failures > 10


@pytest.mark.parametrize("policy", OURS)
def test_a_reset_forgets_all(policy: str) -> None:
    served = Served(policy, 8)
    served.serve(keys_of(8))
    served.manager.reset_cache()
    before = served.hits
    assert served.serve(keys_of(8)) == []
    assert served.hits == before
    assert len(served.serve(keys_of(8, prefix=1)) or ()) == 8
