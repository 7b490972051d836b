"""What vLLM's scheduler does with a manager, in a few calls."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from tests.vllm.conftest import quiet_imports

with quiet_imports():
    from vllm.v1.kv_offload.base import (
        LookupResult,
        ReqContext,
        ScheduleEndContext,
        make_offload_key,
    )
    from vllm.v1.kv_offload.config import (
        OffloadingCacheConfig,
        OffloadingConfig,
        OffloadingGroupConfig,
        OffloadingModelConfig,
        OffloadingParallelConfig,
    )

    from kvtier.integrations.vllm.versions import ANNOUNCES_RESET_FLUSHED

SLOT = 4096
STEP = ScheduleEndContext((), ())
_PATIENCE_S = 30.0
_PAUSE_S = 0.001


def keys_of(count: int, prefix: int = 0) -> list[bytes]:
    """The keys of a prompt of `count` chunks."""
    return [
        make_offload_key(bytes([prefix]) * 28 + position.to_bytes(4, "big"), 0)
        for position in range(count)
    ]


def begin(manager: Any, keys: Sequence[bytes], **options: Any) -> ReqContext:
    """A new request for these keys."""
    context = ReqContext("request", **options)
    for position, key in enumerate(keys):
        context.set_offload_key_position(key, position + 1)
    manager.on_new_request(context)
    return context


def flush(*managers: Any) -> None:
    """No transfer from before a reset runs any more, and vLLM says so as far as it does."""
    for manager in managers:
        for _ in range(2):
            manager.on_schedule_end(STEP)
        if ANNOUNCES_RESET_FLUSHED:
            manager.on_reset_flushed()


def scan(manager: Any, keys: Sequence[bytes], context: ReqContext) -> list[LookupResult] | None:
    """What a scan of a prefix makes of the answers: the hits, or None when the request waits."""
    answers = []
    for key in keys:
        answer = manager.lookup(key, context)
        if answer is LookupResult.MISS:
            break
        answers.append(answer)
    return answers if set(answers) <= {LookupResult.HIT} else None


def offloading_config(slots: int, engine_id: str, *, model: str = "model", **extra: Any) -> Any:
    """What vLLM makes of its configuration, for `slots` chunks of one page in host memory."""
    return OffloadingConfig(
        groups=(OffloadingGroupConfig(16, ("layer",), 0),),
        worker_kv_bytes_per_block=SLOT,
        enable_kv_cache_events=True,
        extra_config={"cpu_bytes_to_use": slots * SLOT, **extra},
        engine_id=engine_id,
        model=OffloadingModelConfig(model, "bfloat16"),
        cache=OffloadingCacheConfig(16, 1),
        parallel=OffloadingParallelConfig(0, 1, 1, 1, 1, 1, 0, 1, None, True),
    )


class Host:
    """A manager and its memory, with the worker's part played by the test."""

    def __init__(self, manager: Any, memory: memoryview, settle: Callable[[], None]) -> None:
        """`settle` waits until no job of a tier is under way."""
        self.manager = manager
        self.memory = memory
        self.settle = settle

    def store(self, keys: Sequence[bytes]) -> None:
        """Stores chunks, each with bytes of its key, and has all tiers keep them."""
        context = begin(self.manager, keys)
        prepared = self.manager.prepare_store(keys, context)
        assert prepared is not None
        slots = prepared.store_spec.block_ids.tolist()
        for key, slot in zip(prepared.keys_to_store, slots, strict=True):
            self.memory[slot * SLOT : (slot + 1) * SLOT] = chunk_of(key)
        if prepared.keys_to_store:
            self.manager.complete_store(set(prepared.keys_to_store), context)
        self.manager.on_request_finished(context)
        self.end_step()

    def end_step(self) -> None:
        """Ends a step, and the next one when all jobs are done."""
        self.manager.on_schedule_end(STEP)
        self.settle()
        self.manager.on_schedule_end(STEP)

    def forget(self) -> None:
        """Empties host memory."""
        self.end_step()
        self.manager.reset_cache()
        flush(self.manager)

    def load(self, keys: Sequence[bytes]) -> tuple[list[bytes], list[str]]:
        """What a new request gets of a prefix when it has waited for it, and whence."""
        context = begin(self.manager, keys)
        end = time.monotonic() + _PATIENCE_S
        while (found := scan(self.manager, keys, context)) is None:
            assert time.monotonic() < end, "a request waits for ever"
            self.end_step()
            time.sleep(_PAUSE_S)
        here = list(keys[: len(found)])
        if not here:
            return [], []
        sources = [self.manager.get_load_source(key, context).value for key in here]
        slots = self.manager.prepare_load(here, context).block_ids.tolist()
        chunks = [bytes(self.memory[slot * SLOT : (slot + 1) * SLOT]) for slot in slots]
        self.manager.complete_load(set(here), context)
        self.manager.on_request_finished(context)
        return chunks, sources


def chunk_of(key: bytes) -> bytes:
    """The bytes that `Host.store` gives a key."""
    return key[-12:-4] * (SLOT // 8)
