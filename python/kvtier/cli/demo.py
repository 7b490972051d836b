"""`kvtier demo`: chats that come back, served from restored KV cache and checked bit by bit."""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvtier.cli.interrupts import heavy_import
from kvtier.cli.sizes import parse_size
from kvtier.demo.options import DemoOptions, ModelSizes

if TYPE_CHECKING:
    from kvtier.demo.records import DemoReport

__all__ = ["add_parser", "run"]

EXIT_DIFFERENCE = 1

_DEFAULTS = DemoOptions()


def add_parser(subparsers: argparse._SubParsersAction[Any]) -> None:
    """Adds the command and its flags."""
    parser = subparsers.add_parser(
        "demo",
        help="chats that come back, served from restored KV cache and checked bit by bit",
        description="A decoder chats about source files in interleaved sessions. When a session "
        "returns, its KV cache comes from the GPU pool, host memory or disk instead of being "
        "computed again; every such turn is then computed again from nothing and compared.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    _add_workload_flags(parser.add_argument_group("workload"))
    _add_pool_flags(parser)
    _add_model_flags(parser.add_argument_group("decoder"))
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=run)


def _add_workload_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--sessions", type=int, default=_DEFAULTS.sessions, help="chats")
    group.add_argument("--turns", type=int, default=_DEFAULTS.turns, help="turns of each chat")
    group.add_argument(
        "--new-tokens", type=int, default=_DEFAULTS.new_tokens, help="tokens of each reply"
    )
    group.add_argument(
        "--context",
        type=int,
        default=_DEFAULTS.context_tokens,
        metavar="BYTES",
        help="bytes of source in the first turn; a byte is a token",
    )
    group.add_argument(
        "--text",
        type=Path,
        nargs="+",
        default=(),
        metavar="FILE",
        help="chat about these files instead of the Python standard library",
    )
    group.add_argument("--seed", type=int, default=_DEFAULTS.seed, help="of weights and workload")


def _add_pool_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("tiers", "SIZE is like 64MiB or 1GB")
    gpu = group.add_mutually_exclusive_group()
    gpu.add_argument("--gpu-blocks", type=int, metavar="N", help="blocks of the GPU pool")
    gpu.add_argument("--gpu-pool", type=parse_size, metavar="SIZE", help="size of the GPU pool")
    group.add_argument("--host", type=parse_size, metavar="SIZE", help="host memory")
    group.add_argument("--disk", type=parse_size, metavar="SIZE", help="disk")
    group.add_argument(
        "--dir",
        type=Path,
        metavar="PATH",
        help="keep the store here, so that a second run starts warm; without it, a temporary "
        "directory is used and removed",
    )
    group.add_argument(
        "--block-size", type=int, default=_DEFAULTS.block_size, help="tokens of one block"
    )
    group.add_argument(
        "--blocks-per-chunk",
        type=int,
        default=_DEFAULTS.blocks_per_chunk,
        help="blocks of one chunk, the unit of offloading",
    )


def _add_model_flags(group: argparse._ArgumentGroup) -> None:
    model = _DEFAULTS.model
    group.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="runs it here")
    group.add_argument("--layers", type=int, default=model.layers, help="layers")
    group.add_argument("--d-model", type=int, default=model.d_model, help="width of the model")
    group.add_argument("--heads", type=int, default=model.heads, help="query heads")
    group.add_argument("--kv-heads", type=int, default=model.kv_heads, help="KV heads")
    group.add_argument("--threads", type=int, help="CPU threads; all that are there without it")


def run(arguments: argparse.Namespace) -> int:
    """Runs the demo and prints what it found; returns 1 if a turn came out different.

    Raises `KvTierError` or `OSError` when it could not run.
    """
    # The cheap checks come first: a wrong flag is answered before torch is imported.
    from kvtier.demo.preflight import plan_demo

    options = _options(arguments)
    plan = plan_demo(options)
    # Threads of OpenMP spin while they wait for each other. With another process on the same
    # CPUs they then wait for one that is not even running: prefill takes three times as long.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    run_demo = heavy_import("kvtier.demo.run").run_demo
    from kvtier.cli import demo_report

    with demo_report.progress(options) as on_turn_end:
        report: DemoReport = run_demo(options, plan=plan, on_turn_end=on_turn_end)
    if arguments.json:
        print(json.dumps(report.as_json()))
    else:
        demo_report.print_report(report)
    for line in report.differences:
        print(f"kvtier demo: difference: {line}", file=sys.stderr)
    return EXIT_DIFFERENCE if report.differences else 0


def _options(arguments: argparse.Namespace) -> DemoOptions:
    return DemoOptions(
        sessions=arguments.sessions,
        turns=arguments.turns,
        new_tokens=arguments.new_tokens,
        context_tokens=arguments.context,
        block_size=arguments.block_size,
        blocks_per_chunk=arguments.blocks_per_chunk,
        model=ModelSizes(
            layers=arguments.layers,
            d_model=arguments.d_model,
            heads=arguments.heads,
            kv_heads=arguments.kv_heads,
        ),
        gpu_blocks=arguments.gpu_blocks,
        gpu_bytes=arguments.gpu_pool,
        host_bytes=arguments.host,
        disk_bytes=arguments.disk,
        directory=arguments.dir,
        device=arguments.device,
        seed=arguments.seed,
        texts=tuple(arguments.text),
        threads=arguments.threads,
    )
