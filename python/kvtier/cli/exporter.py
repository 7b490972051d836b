"""`kvtier exporter`: the figures of all managers on this machine, for Prometheus."""

from __future__ import annotations

import argparse
import sys
import threading
from typing import Any

from kvtier.errors import ConfigError

__all__ = ["DEFAULT_PORT", "add_parser", "run"]

DEFAULT_PORT = 9877


def add_parser(subparsers: argparse._SubParsersAction[Any]) -> None:
    """Adds the command and its flags."""
    parser = subparsers.add_parser(
        "exporter",
        help="serve the figures of running processes to Prometheus",
        description="Serves the figures of all kvtier processes of this user (root: of all users) "
        "under /metrics, read anew at each scrape. The processes notice nothing.",
    )
    parser.add_argument(
        "--address",
        default="127.0.0.1",
        metavar="ADDR",
        help="where to listen (127.0.0.1: this machine only); there is no access control",
    )
    parser.add_argument(
        "--port", type=_port, default=DEFAULT_PORT, help=f"0 takes a free one ({DEFAULT_PORT})"
    )
    parser.add_argument(
        "--once", action="store_true", help="print the metrics instead of serving them, and end"
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Serves until it is interrupted.

    Raises `ConfigError` without prometheus_client, and `OSError` when the port can not be had.
    """
    try:
        import prometheus_client as prometheus
    except ImportError as error:
        raise ConfigError(
            "the exporter needs prometheus_client: pip install 'kvtier[exporter]'"
        ) from error
    from kvtier.pages import read_pages, stats_directory
    from kvtier.prometheus import Collector

    read_pages()  # says now what every scrape would run into
    registry = prometheus.CollectorRegistry(auto_describe=False)
    registry.register(Collector())
    if arguments.once:
        sys.stdout.write(prometheus.generate_latest(registry).decode())
        return 0
    try:
        server, thread = prometheus.start_http_server(
            arguments.port, arguments.address, registry=registry
        )
    except OSError as error:
        place = f"{arguments.address}:{arguments.port}"
        raise OSError(f"can not listen on {place}: {error.strerror}; use another --port") from error
    host = f"[{arguments.address}]" if ":" in arguments.address else arguments.address
    print(f"serving {stats_directory()} on http://{host}:{server.server_port}/metrics", flush=True)
    try:
        threading.Event().wait()
    except KeyboardInterrupt:  # how it is ended
        pass
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
    return 0


def _port(text: str) -> int:
    port = int(text)
    if not 0 <= port <= 0xFFFF:
        raise argparse.ArgumentTypeError(f"{text} is no port; use 0 to 65535")
    return port
