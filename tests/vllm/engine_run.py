"""Runs one scenario in a real engine, in a process of its own: `python engine_run.py IN OUT`.

IN is JSON: `engine` (arguments of `vllm.LLM`), `connector` (its extra config, or null), `events`
(where to publish KV events, or null) and `acts`, done one after the other. OUT gets JSON: what each
act gave, by its `label`, and the engine's metrics at the end.

| `act` | what it does |
|---|---|
| `generate` | serves `prompts` together, with `salts` if given |
| `reset` | forgets the prefix cache and what is behind it |
| `stored` | waits until `chunks` chunks are in the file tier in `path` |
| `damage` | flips a bit in every page of that tier's segments |
| `abort` | adds requests for `prompts`, makes `steps` steps, and aborts them all |
| `until` | serves `prompt` again and again until the metric `figure` is at least 1 |
| `until file` | waits until there is a file in `path` |
| `metrics` | gives the metrics as they are |
| `events` | gives all KV events, as `[stored or removed, medium, owner, block hashes]` |
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

PAGE = 4096
PATIENCE_SECONDS = 120
POLL = 0.01


def main() -> None:
    from vllm import LLM
    from vllm.config import KVEventsConfig, KVTransferConfig

    source, target = map(Path, sys.argv[1:3])
    scenario = json.loads(source.read_text())
    engine = scenario["engine"]
    if scenario["connector"] is not None:
        engine["kv_transfer_config"] = KVTransferConfig(
            kv_connector="OffloadingConnector",
            kv_role="kv_both",
            kv_connector_extra_config=scenario["connector"],
        )
    if scenario["events"] is not None:
        engine["kv_events_config"] = KVEventsConfig(
            enable_kv_cache_events=True,
            publisher="zmq",
            endpoint=scenario["events"],
            replay_endpoint=scenario["events"] + "-replay",
        )
    llm = LLM(**engine)
    acts = [[act.get("label"), ACTS[act["act"]](llm, act)] for act in scenario["acts"]]
    target.write_text(json.dumps({"acts": acts, "metrics": metrics()}))


def generate(llm: Any, act: dict[str, Any]) -> list[dict[str, Any]]:
    """Greedy by default, with the log-probabilities of what was sampled and of the next best."""
    from vllm import SamplingParams, TokensPrompt

    settings = {"temperature": 0.0, "max_tokens": 8, "logprobs": 3, "ignore_eos": True}
    settings |= act.get("params", {})
    prompts = [TokensPrompt(prompt_token_ids=prompt) for prompt in act["prompts"]]
    if salts := act.get("salts"):
        for prompt, salt in zip(prompts, salts, strict=True):
            prompt["cache_salt"] = salt
    outputs = llm.generate(prompts, SamplingParams(**settings), use_tqdm=False)
    return [
        {
            "tokens": list(output.outputs[0].token_ids),
            "logprobs": [
                sorted((token, value.logprob) for token, value in step.items())
                for step in output.outputs[0].logprobs
            ],
            "cached": output.num_cached_tokens,
            "reason": output.outputs[0].finish_reason,
        }
        for output in outputs
    ]


def reset(llm: Any, _: dict[str, Any]) -> bool:
    return bool(llm.reset_prefix_cache(reset_connector=True))


def stored(_: Any, act: dict[str, Any]) -> None:
    """Chunks on their way to the disk need no step of the engine."""
    from kvtier._kvtier import inspect_store

    end = time.monotonic() + PATIENCE_SECONDS
    while (found := inspect_store(act["path"])["chunks"]) < act["chunks"]:
        if time.monotonic() > end:
            raise TimeoutError(f"{found} chunks of {act['chunks']}")
        time.sleep(POLL)


def damage(_: Any, act: dict[str, Any]) -> int:
    """Flips a bit in every page of every segment."""
    pages = 0
    for path in Path(act["path"]).glob("segment-*"):
        content = bytearray(path.read_bytes())
        content[::PAGE] = bytes(byte ^ 1 for byte in content[::PAGE])
        path.write_bytes(content)
        pages += len(content) // PAGE
    return pages


def abort(llm: Any, act: dict[str, Any]) -> int:
    from vllm import SamplingParams, TokensPrompt

    engine = llm.llm_engine
    names = [f"aborted-{number}" for number in range(len(act["prompts"]))]
    for name, prompt in zip(names, act["prompts"], strict=True):
        engine.add_request(
            name,
            TokensPrompt(prompt_token_ids=prompt),
            SamplingParams(temperature=0.0, max_tokens=64, ignore_eos=True),
        )
    for _ in range(act["steps"]):
        engine.step()
    engine.abort_request(names)
    while engine.has_unfinished_requests():
        engine.step()
    return len(names)


def until(llm: Any, act: dict[str, Any]) -> int:
    """Metrics move with the steps of the engine; returns how many requests it took."""
    end = time.monotonic() + PATIENCE_SECONDS
    requests = 0
    while not metrics().get(act["figure"]):
        if time.monotonic() > end:
            raise TimeoutError(f"{act['figure']} stays where it is")
        generate(llm, {"prompts": [act["prompt"]]})
        requests += 1
    return requests


def events(_: Any, act: dict[str, Any]) -> list[list[Any]]:
    """Those that were published before; the publisher keeps them for whoever asks."""
    import msgspec
    import zmq
    from vllm.distributed.kv_events import BlockRemoved, BlockStored, KVEventBatch

    decoder = msgspec.msgpack.Decoder(KVEventBatch)
    found: list[list[Any]] = []
    with zmq.Context() as context, context.socket(zmq.DEALER) as asking:
        asking.connect(act["replay"])
        asking.send_multipart((b"", bytes(8)))
        while payload := asking.recv_multipart()[-1]:
            for event in decoder.decode(payload).events:
                if isinstance(event, (BlockStored, BlockRemoved)):
                    kind = "stored" if isinstance(event, BlockStored) else "removed"
                    hashes = [str(one) for one in event.block_hashes]
                    found.append([kind, event.medium, event.ownership, hashes])
    return found


def until_file(_: Any, act: dict[str, Any]) -> None:
    """Waits for whoever runs the engine."""
    end = time.monotonic() + 2 * PATIENCE_SECONDS
    while not Path(act["path"]).exists():
        if time.monotonic() > end:
            raise TimeoutError(f"{act['path']} does not come")
        time.sleep(POLL)


def metrics() -> dict[str, float]:
    """Everything but vLLM's labels of model and engine, which are the same for all."""
    from prometheus_client import REGISTRY

    found = {}
    for family in REGISTRY.collect():
        for sample in family.samples:
            labels = [v for k, v in sample.labels.items() if k not in ("model_name", "engine")]
            found[sample.name + "".join(f"{{{value}}}" for value in labels)] = sample.value
    return found


ACTS = {
    "generate": generate,
    "reset": reset,
    "stored": stored,
    "damage": damage,
    "abort": abort,
    "until": until,
    "until file": until_file,
    "metrics": lambda llm, act: metrics(),  # noqa: ARG005
    "events": events,
}

if __name__ == "__main__":
    main()
