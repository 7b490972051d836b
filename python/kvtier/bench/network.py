"""The redis tier beside a plain socket and redis-py, on one server in one run.

Stores and loads go through the manager: out of the primary region to the server and back,
checksums included. The plain socket sends the same commands for values of the same length from and
into one fixed buffer, over one connection, and looks at nothing: no client can do less.
"""

from __future__ import annotations

import signal
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, nullcontext

from kvtier import RETRY
from kvtier.bench.figures import Figure, alternate, compared, untaken
from kvtier.bench.redis_rivals import BenchServer, RawSocket, RedisPy, own_server
from kvtier.bench.tier_store import KEY_BYTES, TierStore, numbered_keys, tier_store
from kvtier.errors import ConfigError, TierError

__all__ = ["measure"]

_CHUNKS = {"1MiB": 1 << 20, "4MiB": 4 << 20}
_ENVELOPE_BYTES = 128
_TARGET_RAW, _TARGET_REDIS_PY = 0.85, 2.0
_LOOKUP_KEYS = 512
_TARGET_LOOKUP_MKEYS = 1.0
_STEPS, _STEP_KEYS, _TARGET_STEP = 20, 64, 1.25
_PREFIX = "kvtier-bench"


def measure(*, redis: str | None, size: int, rounds: int) -> Iterator[Figure]:
    """Yields the figures. The server is emptied again and again: give it one of its own."""
    with nullcontext(_named(redis)) if redis else own_server() as server:
        host, port = server.host, server.port
        for label, chunk in _CHUNKS.items():
            yield from _transfers(host, port, label, chunk, size, rounds)
        yield from _lookups(host, port, rounds)
        yield _hanging(server, rounds)


def _named(given: str) -> BenchServer:
    host, colon, port = given.rpartition(":")
    if not colon or not port.isdigit():
        raise ConfigError(f"--redis {given}: use HOST:PORT")
    return BenchServer(host, int(port))


def _config(host: str, port: int) -> dict[str, object]:
    return {"type": "redis", "nodes": [f"{host}:{port}"], "prefix": _PREFIX}


def _transfers(
    host: str, port: int, label: str, chunk: int, size: int, rounds: int
) -> Iterator[Figure]:
    value_bytes = chunk + _ENVELOPE_BYTES
    installed = RedisPy.is_installed()
    with (
        tier_store(_config(host, port), chunk, size) as ours,
        closing(RawSocket(host, port, value_bytes)) as raw,
    ):
        names = [b"kvtier-bench-rival:%d" % number for number in range(ours.count)]
        rivals: dict[str, RawSocket | RedisPy] = {"raw socket": raw}
        if installed:
            rivals["redis-py"] = RedisPy(host, port, value_bytes)

        def emptied(run: Callable[[], float]) -> Callable[[], float]:
            def take() -> float:
                raw.command(b"FLUSHALL", b"SYNC")
                return run()

            return take

        def rate(run: Callable[[Sequence[bytes]], None]) -> Callable[[], float]:
            return lambda: ours.nbytes / _seconds(lambda: run(names)) / 1e9

        stores = [lambda: ours.nbytes / ours.store() / 1e9]
        stores += [rate(rival.store) for rival in rivals.values()]
        taken = alternate(rounds, *map(emptied, stores))
        yield from _figures(f"redis.store.{label}", taken, installed)
        raw.command(b"FLUSHALL", b"SYNC")
        ours.store()
        raw.store(names)
        loads = [lambda: ours.nbytes / ours.load() / 1e9]
        loads += [rate(rival.load) for rival in rivals.values()]
        yield from _figures(f"redis.load.{label}", alternate(rounds, *loads), installed)
        for rival in rivals.values():
            rival.close()


def _figures(name: str, taken: list[list[float]], installed: bool) -> Iterator[Figure]:
    ours, raw = taken[0], taken[1]
    yield compared(name, "GB/s", ours, reference="raw socket", theirs=raw, target=_TARGET_RAW)
    beside = f"{name}.redis-py"
    if not installed:
        yield untaken(beside, "GB/s", "redis and hiredis are not installed")
        return
    yield compared(
        beside, "GB/s", ours, reference="redis-py", theirs=taken[2], target=_TARGET_REDIS_PY
    )


def _seconds(run: Callable[[], None]) -> float:
    began = time.perf_counter()
    run()
    return time.perf_counter() - began


def _lookups(host: str, port: int, rounds: int) -> Iterator[Figure]:
    config = {**_config(host, port), "lookup_deadline_s": 10}
    with (
        tier_store(config, 4096, 4096) as ours,
        closing(RawSocket(host, port, 4 * _LOOKUP_KEYS)) as raw,
    ):
        name = b"%s:1:%s:{%s}" % (_PREFIX.encode(), b"0" * 16, b"0" * 2 * KEY_BYTES)
        exists = b"*2\r\n$6\r\nEXISTS\r\n$%d\r\n%b\r\n" % (len(name), name)
        packed = exists * _LOOKUP_KEYS
        _ask(ours)  # so that a connection is there
        before = ours.round_trips
        asked, plain = alternate(
            rounds,
            lambda: _LOOKUP_KEYS / _ask(ours) / 1e6,
            lambda: _LOOKUP_KEYS / _seconds(lambda: raw.exist(packed, _LOOKUP_KEYS)) / 1e6,
        )
        trips = (ours.round_trips - before) / (rounds + 1)
        figure = f"redis.lookup.{_LOOKUP_KEYS}"
        yield compared(figure, "Mkeys/s", asked, target=_TARGET_LOOKUP_MKEYS)
        yield compared(f"{figure}.pipeline", "Mkeys/s", asked, reference="raw socket", theirs=plain)
        yield compared(f"{figure}.round-trips", "", [trips], target=1.0, smaller_is_better=True)


def _hanging(server: BenchServer, rounds: int) -> Figure:
    """What a step of the engine costs while the server stands still, beside one that answers."""
    name = "redis.step.hanging"
    if server.process is None:
        return untaken(name, "us", "the server is not ours to be stopped: leave --redis out")
    with tier_store(_config(server.host, server.port), 4096, 4096) as ours:
        _ask(ours)  # so that a connection is there
        answering, hanging = [], []
        for _ in range(rounds):
            answering.append(_step(ours))
            server.process.send_signal(signal.SIGSTOP)
            try:
                hanging.append(_step(ours))
            finally:
                server.process.send_signal(signal.SIGCONT)
        return compared(
            name,
            "us",
            hanging,
            reference="answering",
            theirs=answering,
            target=_TARGET_STEP,
            smaller_is_better=True,
        )


def _step(store: TierStore) -> float:
    """The median of steps with a look-up of new keys each, in microseconds."""
    taken = []
    for _ in range(_STEPS):
        store.next_key += _STEP_KEYS
        keys = numbered_keys(store.next_key, _STEP_KEYS)
        began = time.perf_counter()
        store.manager.lookup(store.next_key, keys)
        store.manager.end_step()
        taken.append((time.perf_counter() - began) * 1e6)
    return statistics.median(taken)


def _ask(store: TierStore) -> float:
    """Looks up keys that nobody has asked for; returns the seconds until all is known."""
    store.next_key += _LOOKUP_KEYS
    keys = numbered_keys(store.next_key, _LOOKUP_KEYS)
    last = keys[-1].tobytes()
    manager = store.manager
    began = time.perf_counter()
    manager.lookup(store.next_key, keys)
    # One key, and now and then: on few cores, asking is in the way of the answer.
    while manager.lookup_key(store.next_key, last) == RETRY:
        time.sleep(2e-5)
        if time.perf_counter() - began > 5:
            raise TierError("the server does not answer look-ups")
    return time.perf_counter() - began
