"""Chats that come and go over a memory and a file tier: something for `kvtier top` to show.

    python examples/replayed_load.py --dir /tmp/kvtier-load --seconds 60

There is no model: the host writes the chunks. Each turn of a chat looks its prefix up, waits for
what a tier brings, loads it, stores what is new, and ends a step. The chats are the same in every
run.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Iterator

import numpy as np

import kvtier

CHUNK_BYTES = 256 << 10
CHATS = 40  # at a time
TURNS = 12
CHUNKS_A_TURN = 2
SLOTS = 192


def main() -> None:
    """Serves turns until the time is over."""
    parser = argparse.ArgumentParser(description="chats over a memory and a file tier")
    parser.add_argument("--dir", required=True, help="where the file tier keeps its chunks")
    parser.add_argument("--seconds", type=float, default=60, help="how long it runs")
    parser.add_argument("--turns-per-second", type=float, default=100, help="how fast")
    arguments = parser.parse_args()

    region = kvtier.Region(SLOTS, CHUNK_BYTES)
    memory = {"type": "memory", "name": "memory", "capacity_bytes": 64 << 20}
    disk = {"type": "file", "name": "disk", "path": arguments.dir, "capacity_bytes": 192 << 20}
    manager = kvtier.Manager(region, [memory, disk], namespace="replayed load", key_bytes=8)
    slots = np.frombuffer(region, np.uint8).reshape(SLOTS, -1)
    end = time.monotonic() + arguments.seconds
    for request, (chat, turn) in enumerate(turns()):
        serve(manager, slots, request, keys_of(chat, (turn + 1) * CHUNKS_A_TURN))
        time.sleep(1 / arguments.turns_per_second)
        if time.monotonic() > end:
            break
    manager.drain(10)
    manager.shutdown()


def turns() -> Iterator[tuple[int, int]]:
    """Turns of chats without end. Some chats are busy, others come back after long."""
    random_chats = random.Random(7)
    chats = [(number, 0) for number in range(CHATS)]
    begun = CHATS
    while True:
        place = min(int(random_chats.expovariate(4 / CHATS)), CHATS - 1)
        chat, turn = chats[place]
        yield chat, turn
        if turn + 1 < TURNS:
            chats[place] = (chat, turn + 1)
        else:
            chats[place] = (begun, 0)
            begun += 1


def keys_of(chat: int, chunks: int) -> list[bytes]:
    """The keys of a chat's first chunks."""
    return [(chat << 16 | place).to_bytes(8, "little") for place in range(chunks)]


def serve(manager: kvtier.Manager, slots: np.ndarray, request: int, keys: list[bytes]) -> None:
    """One turn: brings back what there is, and stores the rest."""
    while (found := manager.lookup_prefix(request, keys).tolist()).count(kvtier.HIT_PENDING):
        manager.end_step()
        manager.wait(1.0)
    known = keys[: len(found)] if kvtier.MISS not in found else keys[: found.index(kvtier.MISS)]
    manager.prepare_load(request, known)
    manager.complete_load(request, known)
    prepared = manager.prepare_store(request, keys[len(known) :])
    if prepared is not None:
        slots[prepared.slots] = request % 251
        manager.complete_store(request, [keys[len(known) + place] for place in prepared.indices])
    manager.request_finished(request)
    manager.end_step()


if __name__ == "__main__":
    main()
