"""Runs the demo: opens the parts, serves the turns, judges each one, closes everything."""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from kvtier._kvtier import Manager, Region
from kvtier.demo.decoder import Decoder, DecoderConfig
from kvtier.demo.options import DemoOptions
from kvtier.demo.preflight import DemoPlan, plan_demo
from kvtier.demo.recompute import Recomputer
from kvtier.demo.records import DemoReport, TurnRecord
from kvtier.demo.serving import ChatServer
from kvtier.demo.workload import VOCABULARY
from kvtier.errors import ConfigError
from kvtier.keys import HASH_NAME
from kvtier.torch import CacheGroup, TransferEngine, allocate_kv_cache, layout_identity

__all__ = ["run_demo"]

_DRAIN_SECONDS = 30.0
_TIER = "file"

TurnHook = Callable[[TurnRecord], None]


def run_demo(
    options: DemoOptions,
    *,
    plan: DemoPlan | None = None,
    on_turn_end: TurnHook | None = None,
) -> DemoReport:
    """Serves every turn of the workload and compares each that reused anything.

    `plan` is what `plan_demo(options)` gave, if the caller has it already. `on_turn_end` is
    called after every turn, when no transfer is running, with the record of the turn. Raises
    `ConfigError` for options that can not work, and what the core raises for the store;
    whatever happens, everything that was opened is closed and a temporary store is removed.
    """
    plan = plan or plan_demo(options)
    _check_device(options)
    torch.set_num_threads(plan.threads)
    config = DecoderConfig(
        layers=options.model.layers,
        d_model=options.model.d_model,
        heads=options.model.heads,
        kv_heads=options.model.kv_heads,
        ffn=options.model.ffn,
        vocabulary=VOCABULARY,
        max_tokens=(plan.sizes.session_blocks + 1) * options.block_size,
        seed=options.seed,
    )
    began = time.perf_counter()
    with contextlib.ExitStack() as stack:
        directory = stack.enter_context(_store_directory(options.directory))
        decoder = Decoder(config, options.device)
        specs = config.kv_specs(options.block_size)
        kv_cache = allocate_kv_cache(specs, plan.sizes.gpu_blocks, options.device)
        judge = Recomputer(
            decoder,
            allocate_kv_cache(specs, plan.sizes.session_blocks, options.device),
            options.chunk_tokens,
        )
        region = Region(plan.sizes.host_slots, options.chunk_bytes, prefault_threads=plan.threads)
        tier = {
            "type": _TIER,
            "path": str(directory),
            "capacity_bytes": plan.sizes.disk_bytes,
            # The disk is meant to hold everything, so a slow one must hold stores up (then
            # `prepare_store` has no room) and not have them shed.
            "max_queued_bytes": region.nbytes,
            "high_water_s_per_mib": 60.0,
        }
        manager = Manager(region, [tier], namespace=_namespace(config, plan, kv_cache.groups))
        stack.callback(manager.shutdown)
        warm_chunks = int(manager.stats()["tiers"][_TIER]["chunks"])
        transfers = stack.enter_context(TransferEngine(region, kv_cache, options.blocks_per_chunk))
        server = ChatServer(decoder, kv_cache, transfers, manager)
        turns = list(_serve_all(plan, server, judge, manager, on_turn_end))
        manager.validate()
        server.pool.validate()
        stats = manager.stats()
    counters = server.pool.stats
    return DemoReport(
        turns=turns,
        stats=stats,
        gpu={
            "blocks": server.pool.num_blocks,
            "hits": counters.hits,
            "misses": counters.misses,
            "evictions": counters.evictions,
        },
        stored=server.stored,
        loaded=server.loaded,
        directory=options.directory,
        warm_chunks=warm_chunks,
        chunk_tokens=options.chunk_tokens,
        seconds=time.perf_counter() - began,
        setting=_setting(plan),
    )


def _serve_all(
    plan: DemoPlan,
    server: ChatServer,
    judge: Recomputer,
    manager: Manager,
    on_turn_end: TurnHook | None,
) -> Iterator[TurnRecord]:
    replies: list[list[list[int]]] = [[] for _ in plan.workload.chats]
    kv_cache = server.kv_cache
    for request, (session, turn) in enumerate(plan.workload.order):
        prompt = plan.workload.prompt(session, turn, replies[session])
        served = server.serve(request, prompt, plan.options.new_tokens)
        # Cascades end before anything is timed again: on a small machine a busy disk would
        # slow the recomputed turn down and flatter the ratio.
        manager.drain(_DRAIN_SECONDS)
        ttft_recomputed = token_difference = byte_difference = None
        judged = any(served.reused.values())
        if judged:
            verdict = judge.check(prompt, served.tokens, kv_cache, served.block_ids)
            ttft_recomputed = verdict.ttft_s
            token_difference = verdict.token_difference
            byte_difference = verdict.byte_difference
        server.finish(request, served)
        replies[session].append(served.tokens)
        differences = [text for text in (byte_difference, token_difference) if text]
        record = TurnRecord(
            session=session,
            turn=turn,
            context_tokens=len(prompt),
            reused=served.reused,
            ttft_restored_s=served.ttft_s,
            chunks_not_stored=served.chunks_not_stored,
            ttft_recomputed_s=ttft_recomputed,
            tokens_equal=token_difference is None if judged else None,
            bytes_equal=byte_difference is None if judged else None,
            difference=f"session {session}, turn {turn}: {'; '.join(differences)}"
            if differences
            else None,
        )
        if on_turn_end is not None:
            on_turn_end(record)
        yield record


def _check_device(options: DemoOptions) -> None:
    if options.device != "cuda":
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the driver's complaint is said in our own line
        present = torch.cuda.is_available()
    if not present:
        raise ConfigError("--device cuda: this machine has no usable GPU; use --device cpu")
    # cuBLAS gives the same bits every time only with a fixed workspace.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


@contextlib.contextmanager
def _store_directory(asked: Path | None) -> Iterator[Path]:
    """The store's directory: a temporary one, or the one asked for.

    Directories that were made here and stayed empty, because the run was refused, are removed.
    """
    if asked is None:
        with tempfile.TemporaryDirectory(prefix="kvtier-demo-") as name:
            yield Path(name)
        return
    made = [folder for folder in (asked, *asked.parents) if not folder.exists()]
    asked.mkdir(parents=True, exist_ok=True)
    try:
        yield asked
    finally:
        with contextlib.suppress(OSError):  # not empty: it is a store now
            for folder in made:
                folder.rmdir()


def _namespace(config: DecoderConfig, plan: DemoPlan, groups: Sequence[CacheGroup]) -> str:
    """Canonical JSON of everything that changes a bit of the KV cache."""
    options = plan.options
    device = "cpu"
    if options.device == "cuda":
        device = torch.cuda.get_device_name()
    identity: dict[str, Any] = {
        "model": {
            "name": "kvtier-demo-decoder",
            "layers": config.layers,
            "d_model": config.d_model,
            "heads": config.heads,
            "kv_heads": config.kv_heads,
            "ffn": config.ffn,
            "vocabulary": config.vocabulary,
            "rope_base": config.rope_base,
            "weights_seed": config.seed,
        },
        "layout": layout_identity(groups, options.blocks_per_chunk),
        "hash": {"name": HASH_NAME, "seed": ""},
        "torch": str(torch.__version__),
        "threads": plan.threads,
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "device": device,
    }
    return json.dumps(identity, sort_keys=True, separators=(",", ":"))


def _setting(plan: DemoPlan) -> dict[str, Any]:
    options, sizes = plan.options, plan.sizes
    return {
        "sessions": options.sessions,
        "turns": options.turns,
        "new_tokens": options.new_tokens,
        "device": options.device,
        "threads": plan.threads,
        "layers": options.model.layers,
        "d_model": options.model.d_model,
        "kv_bytes_per_token": options.model.kv_bytes_per_token,
        "chunk_tokens": options.chunk_tokens,
        "chunk_bytes": options.chunk_bytes,
        "gpu_bytes": sizes.gpu_blocks * options.block_bytes,
        "host_bytes": sizes.host_slots * options.chunk_bytes,
        "disk_bytes": sizes.disk_bytes,
        "sources": sorted({chat.title for chat in plan.workload.chats}),
    }
