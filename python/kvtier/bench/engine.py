"""Time to first token of a returning prompt in vLLM's CPU engine, by where its prefix is.

Two engines of the same small model with random weights, each in a process of its own, are asked in
turn for one token behind 1,500 random ones: one with kvtier as its connector, one without any. A
round asks for

- a fresh prompt, in both engines: nothing hits, and the ratio is what the connector costs then;
- it again: it is in vLLM's prefix cache (where a GPU has its blocks; here in memory as well);
- it again, when a longer prompt took those blocks: it is in kvtier's host memory;
- it again, when two more took its slots: it is on disk.

Before each of these, short prompts make steps until everything that the one before it left to do is
done, stores and the disk's writes, so that each figure is of its own request. What a request did
not compute and what was moved for it are checked, so no figure is of something else. `copy` is the
time that the worker reports for a load; each returning prompt is beside the prefix-cache hit and
the copy of its own round.

The engines compute on one core: with a GPU, the cores that copy and check are not those that
compute.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from kvtier.bench.beside_vllm import NOT_INSTALLED, import_vllm, require
from kvtier.bench.figures import Figure, compared, untaken

__all__ = ["measure"]

TOKENS = 1500
LONGER = 2400
"""With its one answer: all blocks that there are."""
BLOCK = 32
CACHED = (TOKENS - 1) // BLOCK * BLOCK
VOCABULARY = 512
LAYERS, KV_HEADS, HEAD = 8, 4, 64
BLOCK_BYTES = BLOCK * 2 * LAYERS * KV_HEADS * HEAD * 2
HOST_SLOTS = 130
"""For the prompt and one longer one; a second longer one takes the slots of both."""
WARM_UP = 2
STEPS = 1000
PAUSE = 0.005

LOADED = "vllm:kv_offload_load_bytes_total"
COPY = "vllm:kv_offload_load_time_total"
READ = "vllm:kv_offload_tiering_read_bytes_total"
PINNED = "vllm:kv_offload_cpu_cache_usage_perc"
WRITING = "vllm:kv_offload_tiering_active_cascade_jobs"


FIGURES = ("no_hit", "prefix_cache", "host", "host_copy", "disk", "disk_copy")
WITHOUT = "no_hit_without_connector"
# Of the prefix-cache hit and the copy of the same round.
LIMITS = {"host": 1.1, "disk": 1.5}
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
}


def measure(*, rounds: int) -> Iterator[Figure]:
    """Yields the times to the first token, in ms; `untaken` ones where there is no vLLM."""
    if import_vllm({"platforms": "vllm.platforms"}) is None:
        for name in FIGURES:
            yield untaken(f"engine.ttft.{name}", "ms", NOT_INSTALLED)
        return
    # The engines' processes get it.
    os.environ |= ENVIRONMENT
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = str(min(os.sched_getaffinity(0)))
    rng = random.Random(0)
    with tempfile.TemporaryDirectory(prefix="kvtier-bench-") as directory:
        make_model(Path(directory) / "model")
        disk = {"type": "file", "path": f"{directory}/store", "capacity_bytes": 1 << 30}
        connector = {
            "spec_name": "KVTierOffloadingSpec",
            "spec_module_path": "kvtier.integrations.vllm",
            "cpu_bytes_to_use": HOST_SLOTS * BLOCK_BYTES,
            "eviction_policy": "lru",
            "secondary_tiers": [disk],
        }
        ours, without = (Engine(Path(directory) / "model", one) for one in (connector, None))
        taken = [one_round(ours, without, rng) for _ in range(WARM_UP + rounds)][WARM_UP:]
        ours.close()
        without.close()
    figures = {name: [one[name] for one in taken] for name in taken[0]}
    for name in FIGURES:
        reference, theirs = None, None
        if name == "no_hit":
            reference, theirs = "without a connector", figures[WITHOUT]
        elif name in LIMITS:
            reference = "prefix-cache hit and copy"
            theirs = [
                hit + copy
                for hit, copy in zip(figures["prefix_cache"], figures[f"{name}_copy"], strict=True)
            ]
        yield compared(
            f"engine.ttft.{name}",
            "ms",
            figures[name],
            reference=reference,
            theirs=theirs,
            target=LIMITS.get(name),
            smaller_is_better=True,
        )


@dataclass(frozen=True)
class Answer:
    """What one request took, and what was moved meanwhile."""

    milliseconds: float
    cached: int
    moved: dict[str, float]


def make_model(directory: Path) -> None:
    """Large enough that a prompt takes a second to compute, or nearly."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=8 * HEAD,
        intermediate_size=2048,
        num_hidden_layers=LAYERS,
        num_attention_heads=8,
        num_key_value_heads=KV_HEADS,
        max_position_embeddings=4096,
        initializer_range=0.15,
    )
    Qwen2ForCausalLM(config).to(torch.bfloat16).save_pretrained(directory)


def serve(pipe: Connection, model: str, connector: dict[str, Any] | None) -> None:
    """One engine: answers prompts until it is given None."""
    from vllm import LLM, SamplingParams, TokensPrompt
    from vllm.config import KVTransferConfig

    transfer = connector and KVTransferConfig(
        kv_connector="OffloadingConnector",
        kv_role="kv_both",
        kv_connector_extra_config=connector,
    )
    llm = LLM(
        model=model,
        skip_tokenizer_init=True,
        enforce_eager=True,
        dtype="bfloat16",
        block_size=BLOCK,
        num_gpu_blocks_override=LONGER // BLOCK + 1,  # vLLM keeps one for itself
        max_model_len=LONGER,
        max_num_batched_tokens=LONGER,
        distributed_executor_backend="uni",
        disable_log_stats=False,
        kv_transfer_config=transfer,
    )
    one_token = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)

    def answer(prompt: list[int]) -> Answer:
        before = counters()
        began = time.perf_counter()
        [output] = llm.generate([TokensPrompt(prompt_token_ids=prompt)], one_token, use_tqdm=False)
        seconds = time.perf_counter() - began
        moved = {name: value - before.get(name, 0.0) for name, value in counters().items()}
        return Answer(1e3 * seconds, output.num_cached_tokens or 0, moved)

    def settle() -> None:
        for _ in range(STEPS):
            figures = counters()
            if not figures.get(PINNED) and not figures.get(WRITING):
                return
            answer([0])
            time.sleep(PAUSE)
        raise TimeoutError("the tiers do not come to rest")

    pipe.send("ready")
    while (prompt := pipe.recv()) is not None:
        settle()
        pipe.send(answer(prompt))


def counters() -> dict[str, float]:
    """The connector's figures, summed over tiers."""
    from prometheus_client import REGISTRY

    found: dict[str, float] = {}
    for family in REGISTRY.collect():
        for sample in family.samples:
            if sample.name in (LOADED, COPY, READ, PINNED, WRITING):
                found[sample.name] = found.get(sample.name, 0.0) + sample.value
    return found


class Engine:
    """An engine in a process of its own."""

    def __init__(self, model: Path, connector: dict[str, Any] | None) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=serve, args=(theirs, str(model), connector))
        self.process.start()
        theirs.close()
        require(self.pipe.recv() == "ready")

    def ask(self, prompt: list[int]) -> Answer:
        self.pipe.send(prompt)
        answer: Answer = self.pipe.recv()
        return answer

    def close(self) -> None:
        self.pipe.send(None)
        self.process.join()


def one_round(ours: Engine, without: Engine, rng: random.Random) -> dict[str, float]:
    """Milliseconds by figure."""

    def fresh(tokens: int) -> list[int]:
        return [rng.randrange(VOCABULARY) for _ in range(tokens)]

    def checked(engine: Engine, cached: int, loaded: int, read: int) -> Answer:
        answer = engine.ask(prompt)
        moved = [answer.moved.get(name, 0.0) / BLOCK_BYTES for name in (LOADED, READ)]
        if [answer.cached, *moved] != [cached, loaded, read]:
            raise RuntimeError(f"{cached}, {loaded} and {read} are expected of {answer}")
        return answer

    prompt = fresh(TOKENS)
    blocks = CACHED // BLOCK
    figures = {
        WITHOUT: checked(without, 0, 0, 0).milliseconds,
        "no_hit": checked(ours, 0, 0, 0).milliseconds,
        "prefix_cache": checked(ours, CACHED, 0, 0).milliseconds,
    }
    ours.ask(fresh(LONGER - 1))
    host = checked(ours, CACHED, blocks, 0)
    for _ in range(2):
        ours.ask(fresh(LONGER - 1))
    disk = checked(ours, CACHED, blocks, blocks)
    figures["host"], figures["host_copy"] = host.milliseconds, 1e3 * host.moved[COPY]
    figures["disk"], figures["disk_copy"] = disk.milliseconds, 1e3 * disk.moved[COPY]
    return figures
