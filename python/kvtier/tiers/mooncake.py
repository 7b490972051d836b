"""The `mooncake` tier: chunks in a Mooncake Store.

A value is a header of 16 bytes (what it is, and the checksum) and the chunk, sent from and received
into the slots of the region, which is registered once. The header of a slot has a place of its own
in a second registered array. A key in the store is `prefix/namespace/key`, where `namespace` is a
digest of whose data it is, the size of its chunks and the version of this format: what another
model stored is never found.

Mooncake's calls have no deadline of ours, and one stopped node or master holds them for 30 s. So
the tier's own thread makes none: look-ups, loads and stores run in lanes of `Callers`. While a
call hangs its slots stay the job's, as they must, and the manager has long called it a miss. A
node that a load hangs on is avoided until that call came back: its chunks are misses, those of
other nodes come.

Memory: 16 bytes a slot, and two dictionaries of at most `_MOST_ANSWERS` keys.
"""

from __future__ import annotations

import hashlib
import json
import logging
import random
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from kvtier._kvtier import HIT, MISS, RETRY
from kvtier.errors import ConfigError
from kvtier.tiers.callers import Callers
from kvtier.tiers.contract import JobResult, SecondaryTier, TierContext

if TYPE_CHECKING:
    from kvtier._kvtier import TierJob

__all__ = ["MooncakeTier"]

_FORMAT = 1
_HEADER = np.dtype([("magic", "<u8"), ("checksum", "<u8")])
_MAGIC = int.from_bytes(b"KVTMOON1", "little")

# Error codes of the store; it gives them as numbers only.
_BUFFER_TOO_SMALL = -600
_NOT_FOUND = -704
_TRANSFER_FAILED = -800

# The first attempt to reach the master is waited for so long; others are made in the background.
_CONNECT_S = 5.0
_CONNECT_PAUSES_S = (0.5, 1.0, 2.0, 4.0, 8.0)
# How long shutdown waits for calls that hang, and a store for a bad copy to be removed.
_PATIENCE_S = 2.0
_LOG_EVERY_S = 1.0
_MOST_ANSWERS = 1 << 16

_log = logging.getLogger("kvtier")


class MooncakeTier(SecondaryTier):
    """Chunks in a Mooncake Store; `docs/network.md` says what each setting does."""

    medium = "network"
    locality = "remote"

    def __init__(
        self,
        context: TierContext,
        *,
        master: str,
        prefix: str = "kvtier",
        hostname: str | None = None,
        metadata_server: str = "P2PHANDSHAKE",
        protocol: str = "tcp",
        rdma_devices: str = "",
        segment_bytes: int = 0,
        replicas: int = 1,
        threads: int = 2,
        answer_within_s: float = 0.02,
        hangs_after_s: float = 1.0,
    ) -> None:
        super().__init__(context)
        host, colon, port = master.rpartition(":")
        if not (colon and host and port.isdecimal()):
            raise ConfigError(f"master = {master!r} is not HOST:PORT")
        if not 1 <= threads <= 64:
            raise ConfigError(f"threads = {threads} is not between 1 and 64")
        if replicas < 1 or segment_bytes < 0:
            raise ConfigError(
                f"replicas = {replicas} must be at least 1, segment_bytes = {segment_bytes} at "
                "least 0"
            )
        if not (answer_within_s > 0 and hangs_after_s > 0):
            raise ConfigError(
                f"answer_within_s = {answer_within_s} and hangs_after_s = {hangs_after_s} must be "
                "above 0"
            )
        try:
            from mooncake import store as library  # large, and only here
        except ImportError as error:
            raise ConfigError(
                f"the mooncake tier needs the package of Mooncake ({error}): pip install "
                "'kvtier[mooncake]', or mooncake-transfer-engine on a machine with CUDA"
            ) from error
        self._library = library
        self._how = library.ReplicateConfig()
        self._how.replica_num = replicas
        self._settings = {
            "local_hostname": hostname or "",
            "metadata_server": metadata_server,
            "global_segment_size": str(segment_bytes),
            "protocol": protocol,
            "rdma_devices": rdma_devices,
            "master_server_addr": master,
        }
        self._names = f"{prefix}/{_namespace_id(context)}/"
        self._region = np.frombuffer(context.region, np.uint8)
        slots = self._region.size // context.chunk_bytes
        self._headers = np.zeros(slots, _HEADER)
        self._answer_within_s = answer_within_s
        self._hangs_after_s = hangs_after_s

        self._store: Any = None
        self._connected = threading.Event()
        self._closing = threading.Event()
        # Guards everything below; woken when a bad copy was removed.
        self._changed = threading.Condition()
        self._results: list[JobResult] = []
        self._wanted: dict[bytes, None] = {}
        self._answers: dict[bytes, int] = {}
        self._asking_since: float | None = None
        self._bad: Counter[bytes] = Counter()
        self._loading: dict[object, tuple[str, float]] = {}
        self._quiet_until = 0.0

        lanes = {"connect": 1, "ask": 1, "remove": 1, "load": threads, "store": threads}
        self._callers = Callers(context.name, lanes, hangs_after_s)
        self._callers.submit("connect", partial(self._connect, host, int(port)))
        self._connected.wait(_CONNECT_S)

    def _connect(self, host: str, port: int) -> None:
        """Joins the store, again and again until it works."""
        tries = 0
        while not self._closing.is_set():
            why = self._join(host, port)
            if why is None:
                self._connected.set()
                return
            self._warn("the master %s:%d can not be used: %s", host, port, why)
            pause = _CONNECT_PAUSES_S[min(tries, len(_CONNECT_PAUSES_S) - 1)]
            tries += 1
            self._closing.wait(pause * random.uniform(0.5, 1.0))

    def _join(self, host: str, port: int) -> str | None:
        """Joins the store, or says why not."""
        settings = dict(self._settings)
        try:
            settings["local_hostname"] = settings["local_hostname"] or _way_to(host, port)
        except OSError as error:
            return str(error)
        store = self._library.MooncakeDistributedStore()
        if code := store.setup(settings):
            return f"setup gave error {code}"
        for array in (self._region, self._headers):
            if code := store.register_buffer(array.ctypes.data, array.nbytes):
                store.close()
                return f"registering {array.nbytes} bytes gave error {code}"
        self._store = store
        return None

    # Look-ups.

    def lookup(self, keys: Sequence[bytes]) -> Sequence[int]:
        """Answers from what was asked before; has the rest asked, all of it in one call."""
        with self._changed:
            answers = [MISS if key in self._bad else self._answers.pop(key, RETRY) for key in keys]
            unknown = [key for key, answer in zip(keys, answers, strict=True) if answer == RETRY]
            since = self._asking_since
            late = since is not None and time.monotonic() - since > self._answer_within_s
            if self._store is None or late or len(self._wanted) >= _MOST_ANSWERS:
                return [MISS if answer == RETRY else answer for answer in answers]
            ask = bool(unknown) and not self._wanted
            self._wanted.update(dict.fromkeys(unknown))
        if ask:
            self._callers.submit("ask", self._ask)
        return answers

    def _ask(self) -> None:
        with self._changed:
            keys, self._wanted = list(self._wanted), {}
            self._asking_since = time.monotonic()
        try:
            names = self._named(keys)
            codes = self._store.batch_is_exist(names)
            here = {name for name, code in zip(names, codes, strict=True) if code == 1}
            if here and (hanging := self._hanging()):
                nodes = self._nodes(sorted(here))
                here = {name for name in here if nodes.get(name) not in hanging}
            failed = [code for code in codes if code < 0]
            if failed:
                self._warn("%d look-ups failed, Mooncake error %d", len(failed), failed[0])
        finally:
            with self._changed:
                self._asking_since = None
                if len(self._answers) > _MOST_ANSWERS:  # of requests that went away
                    self._answers.clear()
        answers = {
            key: HIT if name in here else MISS for key, name in zip(keys, names, strict=True)
        }
        with self._changed:
            self._answers.update(answers)

    # Stores.

    def submit_store(self, job: TierJob) -> None:
        """Queues a store."""
        self._callers.submit("store", partial(self._put, job))

    def _put(self, job: TierJob) -> None:
        if self._is_idle(job):
            return
        with self._changed:
            # A put does nothing for a key that is there, so what is bad must have gone.
            self._changed.wait_for(
                lambda: not any(key in self._bad for key in job.keys), _PATIENCE_S
            )
        rows = [np.frombuffer(chunk, np.uint8) for chunk in job.chunks]
        slots = self._slots(rows)
        self._headers["magic"][slots] = _MAGIC
        self._headers["checksum"][slots] = job.checksums
        codes = self._store.batch_put_from_multi_buffers(
            self._named(job.keys), self._places(slots), self._sizes(slots), self._how
        )
        del rows
        failed = {key: "io" for key, code in zip(job.keys, codes, strict=True) if code < 0}
        if failed:
            self._warn("%d stores failed, Mooncake error %d", len(failed), min(codes))
        self._report(JobResult(job.id, [key for key in job.keys if key not in failed], failed))

    # Loads.

    def submit_load(self, job: TierJob) -> None:
        """Queues a load."""
        self._callers.submit("load", partial(self._locate, job))

    def _locate(self, job: TierJob) -> None:
        """Splits a load by node, so that each is brought, and hangs, by itself."""
        if self._is_idle(job):
            return
        names = self._named(job.keys)
        nodes = self._nodes(names)
        hanging = self._hanging()
        load = _Load(job)
        by_node: dict[str, list[int]] = {}
        for index, name in enumerate(names):
            node = nodes.get(name)
            if node is None:
                load.failed[job.keys[index]] = "missing"
            elif node in hanging:
                load.failed[job.keys[index]] = "io"
            else:
                by_node.setdefault(node, []).append(index)
        load.parts = len(by_node)
        if not by_node:
            self._report(load.result())
        for node, indices in by_node.items():
            self._callers.submit("load", partial(self._get, load, node, indices))

    def _get(self, load: _Load, node: str, indices: list[int]) -> None:
        job = load.job
        if self._is_idle(job):
            return
        keys = [job.keys[index] for index in indices]
        rows = [np.frombuffer(job.chunks[index], np.uint8) for index in indices]
        slots = self._slots(rows)
        self._headers[slots] = 0
        names, sizes = self._named(keys), self._sizes(slots)
        call = object()
        with self._changed:
            self._loading[call] = (node, time.monotonic())
        try:
            codes = self._store.batch_get_into_multi_buffers(names, self._places(slots), sizes)
        finally:
            with self._changed:
                del self._loading[call]
        del rows
        headers = self._headers[slots]
        whole = _HEADER.itemsize + self.context.chunk_bytes
        done, failed, bad = {}, {}, []
        for key, name, code, header in zip(keys, names, codes, headers, strict=True):
            if code == whole and header["magic"] == _MAGIC:
                done[key] = int(header["checksum"])
            elif code == _NOT_FOUND:
                failed[key] = "missing"
            elif code >= 0 or self._is_of_other_size(name, code, whole):
                failed[key] = "corrupt"
                bad.append(key)
            else:
                failed[key] = "io"
        if bad:
            self._warn("%d chunks are not what was stored", len(bad))
            self.discard(bad)
        elif "io" in failed.values():
            self._warn("%d loads from %s failed, Mooncake error %d", len(failed), node, min(codes))
        with self._changed:
            load.done.update(done)
            load.failed.update(failed)
            load.parts -= 1
            ended = load.parts == 0
        if ended:
            self._report(load.result())

    def _is_of_other_size(self, name: str, code: int, whole: int) -> bool:
        """Whether a failure means that the value is not as long as ours are."""
        if code == _BUFFER_TOO_SMALL:
            return True
        return code == _TRANSFER_FAILED and 0 <= self._store.get_size(name) != whole

    # Bad copies.

    def discard(self, keys: Sequence[bytes]) -> None:
        """Makes bad copies misses now, and has them removed."""
        with self._changed:
            self._bad.update(keys)
        self._callers.submit("remove", partial(self._remove, keys))

    def _remove(self, keys: Sequence[bytes]) -> None:
        try:
            codes = self._store.batch_remove(self._named(keys), True)
            kept = [code for code in codes if code not in (0, _NOT_FOUND)]
            if kept:
                self._warn("%d bad copies stay, Mooncake error %d", len(kept), kept[0])
        finally:
            with self._changed:
                self._bad -= Counter(keys)
                self._changed.notify_all()

    # Ends.

    def finished(self) -> Iterable[JobResult]:
        """Gives the results that came."""
        self._callers.tend()
        with self._changed:
            results, self._results = self._results, []
        return results

    def shutdown(self) -> None:
        """Ends the threads; a store that a call hangs in is closed when that call came back."""
        self._closing.set()
        if not self._callers.close(_PATIENCE_S, self._leave):
            self._warn("a call hangs: the store is left when it ends")

    def _leave(self) -> None:
        store, self._store = self._store, None
        if store is not None:
            for array in (self._region, self._headers):
                store.unregister_buffer(array.ctypes.data)
            store.close()

    def _report(self, result: JobResult) -> None:
        with self._changed:
            self._results.append(result)
        self.context.notify()

    def _is_idle(self, job: TierJob) -> bool:
        """Whether nothing is to be done for a job: nobody waits for it, or there is no store."""
        if job.cancelled:
            return True
        if self._store is None:
            self._report(JobResult(job.id, failed=dict.fromkeys(job.keys, "io")))
            return True
        return False

    def _warn(self, text: str, *values: object) -> None:
        """Logs a line, once a second at most."""
        now = time.monotonic()
        with self._changed:
            if now < self._quiet_until:
                return
            self._quiet_until = now + _LOG_EVERY_S
        _log.warning('tier "%s": ' + text, self.context.name, *values)

    # The store's names and places.

    def _named(self, keys: Iterable[bytes]) -> list[str]:
        return [self._names + key.hex() for key in keys]

    def _nodes(self, names: list[str]) -> dict[str, str]:
        """Says which node each value is read from; those that are gone are left out."""
        found = self._store.batch_get_replica_desc(names)
        return {
            name: replica.get_memory_descriptor().buffer_descriptor.transport_endpoint
            for name, replicas in found.items()
            for replica in replicas[:1]
            if replica.is_memory_replica()
        }

    def _hanging(self) -> set[str]:
        """The nodes that a load hangs on."""
        before = time.monotonic() - self._hangs_after_s
        with self._changed:
            return {node for node, began in self._loading.values() if began < before}

    def _slots(self, rows: list[Any]) -> Any:
        first = self._region.ctypes.data
        addresses = np.array([row.ctypes.data for row in rows], np.int64)
        return (addresses - first) // self.context.chunk_bytes

    def _places(self, slots: Any) -> list[list[int]]:
        headers = self._headers.ctypes.data + slots * _HEADER.itemsize
        chunks = self._region.ctypes.data + slots * self.context.chunk_bytes
        places: list[list[int]] = np.stack([headers, chunks], axis=1).tolist()
        return places

    def _sizes(self, slots: Any) -> list[list[int]]:
        return [[_HEADER.itemsize, self.context.chunk_bytes]] * len(slots)


class _Load:
    """A load that is brought in parts; guarded by the tier's lock."""

    def __init__(self, job: TierJob) -> None:
        self.job = job
        self.parts = 0
        self.done: dict[bytes, int] = {}
        self.failed: dict[bytes, str] = {}

    def result(self) -> JobResult:
        return JobResult(self.job.id, self.done, self.failed)


def _namespace_id(context: TierContext) -> str:
    """Digests whose data it is. A namespace that is JSON is the same in any order of its fields."""
    try:
        namespace = json.loads(context.namespace)
    except ValueError:
        namespace = context.namespace
    identity = [_FORMAT, context.chunk_bytes, context.key_bytes, namespace]
    canonical = json.dumps(identity, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()[:32]


def _way_to(host: str, port: int) -> str:
    """Gives the address of this machine on the way to a host. Sends nothing."""
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0])
