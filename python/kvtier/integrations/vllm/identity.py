"""What a store of chunks is bound to: the namespace, out of vLLM's configuration.

Keys are hashes over tokens, so two models that saw the same prompt ask for the same keys. Whatever
else decides which bytes a key stands for is in the namespace, and a store that was written under
another one is refused: model, revision, architecture and rotary settings, data types, layout,
parallel sizes, hash algorithm and seed, platform and version of vLLM. What vLLM's settings can not
tell, new weights in the same place, the user names in `namespace`.

Workers know the model, the scheduler does not: `worker_facts` is asked in a worker, and goes to
the scheduler with the region (`meeting`).
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
from typing import Any

import torch
from vllm.config import get_current_vllm_config
from vllm.utils.hashing import get_hash_fn_by_name

from kvtier.integrations.vllm.layout import CHUNK_ORDER
from kvtier.integrations.vllm.versions import running_version

__all__ = ["key_bytes", "namespace_of", "seed_is_random", "worker_facts"]

# Of a Hugging Face config: what says where it came from, not what the model computes.
_NOT_IDENTITY = ("_name_or_path", "transformers_version", "architectures_hash")
# vLLM draws a seed for these when PYTHONHASHSEED gives none.
_RANDOM_SEED = ("xxhash", "xxhash_cbor")
_GROUP_BYTES = 4


def worker_facts(device: torch.device) -> dict[str, Any]:
    """What a worker knows of the model and the engine; call it where vLLM has its config set."""
    vllm_config = get_current_vllm_config()
    model = vllm_config.model_config
    speculative = vllm_config.speculative_config
    architecture = model.hf_config.to_dict()
    for field in _NOT_IDENTITY:
        architecture.pop(field, None)
    return {
        "revision": model.revision,
        "architecture": _digest(architecture),
        "quantization": None if model.quantization is None else str(model.quantization),
        "draft_model": None if speculative is None else str(speculative.model),
        "platform": _platform(device),
        "hash": vllm_config.cache_config.prefix_caching_hash_algo,
        "batches_in_flight": vllm_config.max_concurrent_batches,
    }


def key_bytes(facts: dict[str, Any]) -> int:
    """Bytes of an offload key: a block hash, and the index of its group."""
    return len(get_hash_fn_by_name(facts["hash"])(b"")) + _GROUP_BYTES


def seed_is_random(facts: dict[str, Any]) -> bool:
    """Whether no other process can make the same keys, so that none finds what this one stored."""
    return facts["hash"] in _RANDOM_SEED and "PYTHONHASHSEED" not in os.environ


def namespace_of(config: Any, facts: dict[str, Any], extra: str) -> str:
    """The namespace of vLLM's `OffloadingConfig`, as canonical JSON."""
    parallel = config.parallel
    sizes = {
        "world": parallel.world_size,
        "tensor": parallel.tp_size,
        "pipeline": parallel.pp_size,
        "prefill_context": parallel.pcp_size,
        "decode_context": parallel.dcp_size,
    }
    # Canonical pages are the same whatever the ranks.
    portable = config.canonical_layout and parallel.is_parallelism_agnostic
    seed = "random" if seed_is_random(facts) else _digest(os.environ.get("PYTHONHASHSEED"))
    identity = {
        "engine": f"vllm {running_version()}",
        "model": config.model.name,
        "dtype": config.model.dtype,
        **{field: value for field, value in facts.items() if field != "batches_in_flight"},
        "hash_seed": seed,
        "layout": config.kv_cache_layout,
        "order": CHUNK_ORDER,
        "canonical": config.canonical_layout,
        "replicated": config.replicated_layout,
        "groups": [[group.tokens_per_block, _digest(group.layer_names)] for group in config.groups],
        "tokens_per_hash": config.cache.tokens_per_hash,
        "blocks_per_chunk": config.cache.blocks_per_chunk,
        "block_bytes": None if portable else config.worker_kv_bytes_per_block,
        "parallel": None if portable else sizes,
        "namespace": extra,
    }
    return json.dumps(identity, sort_keys=True, separators=(",", ":"))


def _digest(value: Any) -> str:
    text = json.dumps(value, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _platform(device: torch.device) -> str:
    if device.type != "cpu":
        return device.type
    # vLLM's CPU kernels order a page as the instructions of the machine want it.
    return f"cpu {platform.machine()} {torch.backends.cpu.get_cpu_capability()}"
