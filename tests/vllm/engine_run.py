"""Runs one scenario in a real engine, in a process of its own: `python engine_run.py IN OUT`.

IN is JSON: `engine` (arguments of `vllm.LLM`), `connector` (its extra config, or null) and `acts`,
done one after the other. OUT gets JSON: what each act gave, and the engine's metrics at the end.

Acts, by their `act`: `generate` serves `prompts` together; `reset` forgets the prefix cache and
what is behind it; `stored` waits until `chunks` chunks are in files below `path`; `damage` flips a
byte in the middle of each of these files; `abort` adds requests for `prompts`, makes `steps`
steps, and aborts them all; `settle` waits `seconds` for tiers without an event to wait for, those
that hang; `until` waits for the file `path`.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

PAGE = 4096
STORED_SECONDS = 60
POLL = 0.01


def main() -> None:
    from vllm import LLM
    from vllm.config import KVTransferConfig

    source, target = map(Path, sys.argv[1:3])
    scenario = json.loads(source.read_text())
    engine = scenario["engine"]
    if scenario["connector"] is not None:
        engine["kv_transfer_config"] = KVTransferConfig(
            kv_connector="OffloadingConnector",
            kv_role="kv_both",
            kv_connector_extra_config=scenario["connector"],
        )
    llm = LLM(**engine)
    results = [ACTS[act["act"]](llm, act) for act in scenario["acts"]]
    target.write_text(json.dumps({"results": results, "metrics": metrics()}))


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


def chunk_files(directory: str) -> list[Path]:
    files = [path for path in Path(directory).rglob("*") if path.is_file()]
    return [path for path in files if path.stat().st_size > PAGE]


def stored(_: Any, act: dict[str, Any]) -> None:
    """Waits for chunks on their way to the disk: they need no step of the engine."""
    end = time.monotonic() + STORED_SECONDS
    while len(chunk_files(act["path"])) < act["chunks"]:
        if time.monotonic() > end:
            raise TimeoutError(f"{len(chunk_files(act['path']))} chunks of {act['chunks']}")
        time.sleep(POLL)


def damage(_: Any, act: dict[str, Any]) -> int:
    files = chunk_files(act["path"])
    for path in files:
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 0xFF
        path.write_bytes(content)
    return len(files)


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


def settle(_: Any, act: dict[str, Any]) -> None:
    time.sleep(act["seconds"])


def until(_: Any, act: dict[str, Any]) -> None:
    """Waits for whoever runs the engine."""
    end = time.monotonic() + STORED_SECONDS * 2
    while not Path(act["path"]).exists():
        if time.monotonic() > end:
            raise TimeoutError(act["path"])
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
    "settle": settle,
    "until": until,
}

if __name__ == "__main__":
    main()
