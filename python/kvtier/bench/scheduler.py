"""Time that vLLM's scheduler spends in its connector, with kvtier and with vLLM's own tiers.

vLLM's real `OffloadingConnectorScheduler` is driven as the scheduler drives it: `requests`
requests of `tokens` tokens, blocks of 64 tokens, all of their chunks on disk and none in host
memory. (64 requests of 32,768 tokens are 512 chunks each.)

- `scheduler.loading`: every step asks for every request that waits, until all have their chunks
  in host memory; then their loads are prepared and completed. `scheduler.steps` is how many.
- `scheduler.running`: all decode, a token a step. Nothing is stored: vLLM offloads prompts.

Time is that of calls of the connector, `get_stats` included; waiting for the disk is not in it.
vLLM's side is `TieringOffloadingManager` with its `fs` tier, kvtier's its file tier; both have 32
KiB in a chunk, and the page cache to read from. Without vLLM there is nothing to measure.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import kvtier
from kvtier.bench.beside_vllm import NOT_INSTALLED, import_vllm, numbered_hashes, require
from kvtier.bench.figures import Figure, compared, untaken
from kvtier.errors import ConfigError

__all__ = ["measure"]

BLOCK = 64
CHUNK = 32 * 1024
DECODE_STEPS = 200
MOST_STEPS = 100_000
PAUSE = 0.001
REFERENCE = "vLLM TieringOffloadingSpec, fs"
# Of each figure: its unit, and the part of vLLM's that it may take.
FIGURES = {
    "loading": ("ms", 1 / 10),
    "running": ("ms", 1 / 10),
    "steps": ("steps", None),
}

MODULES = {
    "versions": "kvtier.integrations.vllm.versions",
    "base": "vllm.v1.kv_offload.base",
    "config": "vllm.v1.kv_offload.config",
    "cache": "vllm.v1.kv_cache_interface",
    "connector": "vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler",
    "common": "vllm.distributed.kv_transfer.kv_connector.v1.offloading.common",
    "tiering": "vllm.v1.kv_offload.tiering.manager",
    "factory": "vllm.v1.kv_offload.tiering.factory",
    "request": "vllm.v1.request",
    "sampling": "vllm.sampling_params",
    "torch": "torch",
    "ours": "kvtier.integrations.vllm.manager",
}


@dataclass(frozen=True)
class Load:
    """What the connector is driven with."""

    requests: int
    tokens: int

    @property
    def chunks(self) -> int:
        """Of one request."""
        return self.tokens // BLOCK

    @property
    def slots(self) -> int:
        """Of the primary tier: all chunks of all requests."""
        return self.requests * self.chunks

    def hashes(self) -> list[list[bytes]]:
        """The block hashes of each request."""
        return [
            [key[:32] for key in numbered_hashes(number * self.chunks, self.chunks)]
            for number in range(self.requests)
        ]


def measure(*, requests: int, tokens: int, rounds: int) -> Iterator[Figure]:
    """Yields the figures; `untaken` ones where there is no vLLM.

    Raises `ConfigError` for less than one request of whole blocks.
    """
    if requests < 1 or tokens < BLOCK or tokens % BLOCK:
        raise ConfigError(
            f"--requests {requests} --tokens {tokens}: ask for one request or more, and for a "
            f"multiple of {BLOCK} tokens"
        )
    vllm = import_vllm(MODULES)
    # Its connector is driven by hand, call by call, as that of 0.32 wants it.
    if vllm is None or vllm.versions.running_version() != "0.32":
        for name, (unit, _) in FIGURES.items():
            yield untaken(f"scheduler.{name}.vllm", unit, NOT_INSTALLED)
        return
    load = Load(requests, tokens)
    hashes = load.hashes()
    rows: dict[str, dict[str, list[float]]] = {name: {} for name in FIGURES}
    with ExitStack() as stack:
        directory = stack.enter_context(tempfile.TemporaryDirectory(prefix="kvtier-bench-"))
        sides: dict[str, Connector] = {}
        for name, make in (("ours", our_manager), ("theirs", their_manager)):
            sides[name] = Connector(vllm, load, make, Path(directory) / name)
            stack.callback(sides[name].scheduler.shutdown)
            fill(sides[name], hashes)
        for _ in range(rounds):
            for name, connector in sides.items():
                for figure, value in zip(FIGURES, run(connector, hashes), strict=True):
                    rows[figure].setdefault(name, []).append(value)
    for name, (unit, limit) in FIGURES.items():
        yield compared(
            f"scheduler.{name}.vllm",
            unit,
            rows[name]["ours"],
            reference=REFERENCE,
            theirs=rows[name]["theirs"],
            target=limit,
            smaller_is_better=True,
        )


class Region:
    """What vLLM's primary tier asks of its mapping; `kvtier.Region`'s memory."""

    def __init__(self, slots: int) -> None:
        self.region = kvtier.Region(slots, CHUNK, prefault_threads=2)

    def create_kv_memoryview(self) -> memoryview:
        return memoryview(self.region)

    def cleanup(self) -> None:
        pass


def offloading_config(vllm: SimpleNamespace) -> Any:
    """What vLLM makes of its configuration."""
    config = vllm.config
    return config.OffloadingConfig(
        groups=(config.OffloadingGroupConfig(BLOCK, ("layer",), 0),),
        worker_kv_bytes_per_block=CHUNK,
        enable_kv_cache_events=False,
        extra_config={},
        engine_id="bench",
        model=config.OffloadingModelConfig("model", "bfloat16"),
        cache=config.OffloadingCacheConfig(BLOCK, 1),
        parallel=config.OffloadingParallelConfig(0, 1, 1, 1, 1, 1, 0, 1, None, True),
    )


def our_manager(vllm: SimpleNamespace, slots: int, _: Any, disk: Path) -> Any:
    limits = {"max_queued_bytes": slots * CHUNK, "high_water_s_per_mib": 60.0}
    # All requests return at once, and theirs bounds neither.
    limits |= {"load_deadline_s": 300, "store_deadline_s": 300, "load_share": 1.0}
    tier = {"type": "file", "path": str(disk), "capacity_bytes": 4 * slots * CHUNK, **limits}
    region = kvtier.Region(slots, CHUNK, prefault_threads=2)
    return vllm.ours.KVTierOffloadingManager(kvtier.Manager(region, [tier]))


def their_manager(vllm: SimpleNamespace, slots: int, spec: Any, disk: Path) -> Any:
    primary = vllm.tiering.CPUPrimaryTierOffloadingManager(slots, Region(slots))
    tier = vllm.factory.SecondaryTierFactory.create_secondary_tier(
        {"type": "fs", "root_dir": str(disk)}, primary.get_kv_memoryview(), spec
    )
    return vllm.tiering.TieringOffloadingManager(primary, [tier])


class Connector:
    """vLLM's connector over one of the managers, and what was spent in it."""

    def __init__(
        self, vllm: SimpleNamespace, load: Load, make: Callable[..., Any], disk: Path
    ) -> None:
        self.vllm, self.load = vllm, load

        base: Any = vllm.base.OffloadingSpec

        class Spec(base):  # type: ignore[misc]
            def get_manager(self) -> Any:
                return make(vllm, load.slots, self, disk)

            def get_worker(self, kv_caches: Any) -> Any:
                raise NotImplementedError

        spec = Spec(offloading_config(vllm))
        cache = vllm.cache
        attention = cache.FullAttentionSpec(
            block_size=BLOCK, num_kv_heads=1, head_size=128, dtype=vllm.torch.bfloat16
        )
        groups = [cache.KVCacheGroupSpec(["layer"], attention)]
        engine = SimpleNamespace(
            cache_config=SimpleNamespace(
                prefix_cache_retention_interval=None, enable_prefix_caching=True
            ),
            speculative_config=None,
            parallel_config=SimpleNamespace(world_size=1, decode_context_parallel_size=1),
        )
        kv_cache = cache.KVCacheConfig(load.slots + 1, [], groups)
        connector = vllm.connector.OffloadingConnectorScheduler
        self.scheduler = connector(spec, engine, kv_cache)
        self.spent = 0
        self.steps = 0

    def timed(self, verb: Callable[..., Any], *arguments: Any) -> Any:
        start = time.perf_counter_ns()
        answer = verb(*arguments)
        self.spent += time.perf_counter_ns() - start
        return answer

    def step(self, scheduled: dict[str, int], new: list[Any], finished: set[str]) -> None:
        """One step: what was scheduled, and the results of the one before."""
        output = SimpleNamespace(
            scheduled_new_reqs=new,
            scheduled_cached_reqs=SimpleNamespace(req_ids=[], resumed_req_ids=(), new_block_ids=[]),
            num_scheduled_tokens=scheduled,
            finished_req_ids=finished,
            preempted_req_ids=None,
            kv_cache_block_copies=None,
            kv_connector_block_state=None,
        )
        meta = self.timed(self.scheduler.build_connector_meta, output)
        done = self.vllm.common.OffloadingWorkerMetadata()
        for job in (*meta.load_jobs, *meta.store_jobs):
            done.mark_completed(job)
        result = SimpleNamespace(kv_connector_worker_meta=done)
        self.timed(self.scheduler.update_connector_output, result)
        self.timed(self.scheduler.get_stats)
        self.steps += 1

    def take(self) -> float:
        """Milliseconds a step since the last call."""
        spent, steps = self.spent, self.steps
        self.spent = self.steps = 0
        return spent / steps / 1e6


def fill(connector: Connector, hashes: list[list[bytes]]) -> None:
    """Has all chunks in the tier, and host memory empty."""
    manager = connector.scheduler.manager
    base = connector.vllm.base
    for number, of_request in enumerate(hashes):
        context = base.ReqContext(f"fill {number}")
        manager.on_new_request(context)
        keys = [base.make_offload_key(key, 0) for key in of_request]
        require(bool(manager.prepare_store(keys, context).keys_to_store))
        manager.complete_store(keys, context)
        manager.on_request_finished(context)
    settle(connector)
    manager.reset_cache()
    for _ in range(3):
        connector.step({}, [], set())
    connector.take()


def settle(connector: Connector) -> None:
    """Until no job is under way."""
    manager = connector.scheduler.manager
    own = getattr(manager, "manager", None)
    if own is not None:
        require(own.drain(600))
    while manager.has_pending_work():
        connector.step({}, [], set())
        time.sleep(PAUSE)


def run(connector: Connector, hashes: list[list[bytes]]) -> tuple[float, float, int]:
    """Milliseconds a step while loading and while running, and steps of loading."""
    vllm, load, scheduler = connector.vllm, connector.load, connector.scheduler
    requests = []
    for number, of_request in enumerate(hashes):
        request = vllm.request.Request(
            f"request {number}",
            list(range(load.tokens + 1)),
            vllm.sampling.SamplingParams(max_tokens=DECODE_STEPS),
            None,
            block_hasher=lambda _, of_request=of_request: of_request,
        )
        connector.timed(scheduler.on_new_request, request)
        requests.append(request)
    waiting = list(requests)
    first_block = 1
    while waiting:
        require(connector.steps < MOST_STEPS)
        new, still = [], []
        for request in waiting:
            tokens, _ = connector.timed(scheduler.get_num_new_matched_tokens, request, 0, None)
            if tokens is None:
                still.append(request)
                continue
            require(tokens == load.tokens)
            ids = list(range(first_block, first_block + load.chunks))
            first_block += load.chunks
            blocks = [SimpleNamespace(block_id=i, is_null=False, block_hash=None) for i in ids]
            given = SimpleNamespace(blocks=(blocks,))
            connector.timed(scheduler.update_state_after_alloc, request, given, tokens)
            new.append(SimpleNamespace(req_id=request.request_id, block_ids=(ids,)))
            request.num_computed_tokens = load.tokens
        connector.step({one.req_id: 1 for one in new}, new, set())
        waiting = still
        time.sleep(PAUSE)
    steps = connector.steps
    loading = connector.take()
    for _ in range(DECODE_STEPS):
        connector.step({request.request_id: 1 for request in requests}, [], set())
    running = connector.take()
    for request in requests:
        request.status = vllm.request.RequestStatus.FINISHED_LENGTH_CAPPED
        connector.timed(scheduler.request_finished, request)
    connector.step({}, [], {request.request_id for request in requests})
    settle(connector)
    scheduler.manager.reset_cache()
    for _ in range(3):
        connector.step({}, [], set())
    connector.take()
    return loading, running, steps
