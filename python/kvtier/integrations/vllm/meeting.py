"""How the processes of one engine find their region, and its scheduler the worker's facts.

vLLM starts the workers before the scheduler, in processes of their own, and gives them nothing in
common but `engine_id`. The first worker makes the region and leaves a note, a small file named
after the engine; other workers attach by it; the scheduler, which comes last, attaches and
removes it. The region itself is a memfd: it ends with its last user, however that ends. An engine
that is killed while it starts leaves its note; the next engine of that name finds that the region
is gone and makes a new one.

The note is locked while it is read and written, readable by its owner only, and refused when
somebody else owns it.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

from kvtier._kvtier import Region
from kvtier.errors import ConfigError, RegionError
from kvtier.integrations.vllm.layout import SlotLayout

__all__ = ["join_as_scheduler", "join_as_worker", "note_path"]


def note_path(engine_id: str) -> Path:
    """Where the processes of this engine meet."""
    shared = Path("/dev/shm")  # noqa: S108  (owner and mode are checked)
    directory = shared if os.access(shared, os.W_OK) else Path(tempfile.gettempdir())
    name = hashlib.sha256(engine_id.encode()).hexdigest()[:24]
    return directory / f"kvtier-{os.getuid()}-{name}.json"


def join_as_worker(
    engine_id: str, layout: SlotLayout, facts: dict[str, Any], prefault_threads: int
) -> Region:
    """Makes the engine's region, or attaches to the one that another worker made.

    `facts` are what only workers know of the model; the scheduler gets them. Raises
    `ConfigError` when another worker has other ones, or a region of another shape.
    """
    ours = {"slots": layout.slots, "slot_bytes": layout.slot_bytes, "facts": facts}
    with _locked(note_path(engine_id)) as file:
        text = file.read()
        if text:
            note = json.loads(text)
            name = note.pop("region")
            try:
                region = Region.attach(name)
            except RegionError:
                pass  # Of an engine that is no more.
            else:
                if note != json.loads(json.dumps(ours)):
                    raise ConfigError(
                        f"workers of engine {engine_id!r} differ: one has {note}, this one {ours}; "
                        "give every engine of this machine an engine_id of its own"
                    )
                return region
        region = Region(layout.slots, layout.slot_bytes, prefault_threads=prefault_threads)
        file.seek(0)
        file.truncate()
        json.dump({"region": region.name, **ours}, file)
        return region


def join_as_scheduler(engine_id: str, layout: SlotLayout) -> tuple[Region, dict[str, Any]]:
    """Attaches to the region that the workers made; returns it and the workers' facts.

    Raises `ConfigError` when there is none, or it has another shape.
    """
    path = note_path(engine_id)
    with _locked(path) as file:
        text = file.read()
        path.unlink()
        if not text:
            raise ConfigError(
                f"no worker of engine {engine_id!r} made a region: the scheduler must start after "
                "its workers, on the same machine"
            )
        note = json.loads(text)
        region = Region.attach(note["region"])
        if (region.slots, region.slot_bytes) != (layout.slots, layout.slot_bytes):
            raise ConfigError(
                f"the workers of engine {engine_id!r} made {region.slots} slots of "
                f"{region.slot_bytes} bytes, but its scheduler needs {layout.slots} of "
                f"{layout.slot_bytes}"
            )
        facts: dict[str, Any] = note["facts"]
        return region, facts


@contextmanager
def _locked(path: Path) -> Iterator[TextIO]:
    """Opens the note, made empty if there is none, and keeps others out meanwhile."""
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = os.open(path, flags, 0o600)
    with open(descriptor, "r+", encoding="utf-8") as file:  # noqa: PTH123  (a descriptor)
        if os.fstat(descriptor).st_uid != os.getuid():
            raise ConfigError(f"{path} belongs to another user: remove it")
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield file
