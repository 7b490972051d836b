"""Asks a model about one document, again and again, with more documents than the GPU can keep.

    python examples/vllm_offline.py MODEL --disk DIR

Each round asks about every document. From the second round on, their KV cache comes from kvtier's
tiers; a second run finds it on the disk.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

from vllm import LLM, SamplingParams
from vllm.config import KVTransferConfig

SENTENCE = "Chapter {chapter} of book {book} says that everything is kept until it is needed. "


def main() -> None:
    """Serves the rounds and prints what each took."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("model")
    parser.add_argument("--disk", type=Path, required=True, help="directory of the file tier")
    parser.add_argument("--disk-bytes", type=int, default=1 << 34, help="default %(default)s")
    parser.add_argument("--host-bytes", type=int, default=1 << 32, help="default %(default)s")
    parser.add_argument("--documents", type=int, default=8, help="default %(default)s")
    parser.add_argument("--chapters", type=int, default=100, help="default %(default)s")
    parser.add_argument("--rounds", type=int, default=3, help="default %(default)s")
    parser.add_argument(
        "--llm", action="append", default=[], metavar="NAME=VALUE", help="for vllm.LLM; repeat"
    )
    arguments = parser.parse_args()
    llm = LLM(
        model=arguments.model,
        kv_transfer_config=KVTransferConfig(
            kv_connector="OffloadingConnector",
            kv_role="kv_both",
            kv_connector_extra_config={
                "spec_name": "KVTierOffloadingSpec",
                "spec_module_path": "kvtier.integrations.vllm",
                "cpu_bytes_to_use": arguments.host_bytes,
                "secondary_tiers": [
                    {
                        "type": "file",
                        "path": str(arguments.disk),
                        "capacity_bytes": arguments.disk_bytes,
                    }
                ],
            },
        ),
        **dict(map(option, arguments.llm)),
    )
    documents = [
        "".join(
            SENTENCE.format(book=book, chapter=chapter) for chapter in range(arguments.chapters)
        )
        for book in range(arguments.documents)
    ]
    for number in range(arguments.rounds):
        began = time.perf_counter()
        tokens = reused = 0
        for document in documents:
            prompt = f"{document}\nQuestion {number}: what is kept?\nAnswer:"
            [output] = llm.generate(
                prompt, SamplingParams(temperature=0.0, max_tokens=8), use_tqdm=False
            )
            tokens += len(output.prompt_token_ids or ())
            reused += output.num_cached_tokens or 0
        seconds = time.perf_counter() - began
        print(f"round {number}: {tokens} prompt tokens, {reused} of them reused, {seconds:.2f} s")


def option(text: str) -> tuple[str, Any]:
    """`name=value`, the value as JSON where it is."""
    name, _, value = text.partition("=")
    try:
        return name, json.loads(value)
    except json.JSONDecodeError:
        return name, value


if __name__ == "__main__":
    main()
