"""Stores chunks until it is killed: `python file_writer.py DIR CAPACITY IO DIRECT FIRST END SEED`.

Writes `stored N` to standard output once chunk N is in the file tier, and `gone N` when the tier
evicted it. Chunks from FIRST to END are drawn by the seed; what a chunk holds follows from its
number alone.
"""

from __future__ import annotations

import random
import sys

import numpy as np
from numpy.typing import NDArray

import kvtier

KEY_BYTES = 8
# Large and many at once: the more of its time the tier is between two steps of a chunk, the
# likelier a kill finds it there.
CHUNK = 1 << 17
NUMBERS = 320
BATCH = 8


def key(number: int) -> bytes:
    return number.to_bytes(KEY_BYTES, "big")


def content(number: int) -> NDArray[np.uint8]:
    return np.random.default_rng(number).integers(0, 256, CHUNK, np.uint8)


def open_manager(path: str, capacity: int, io: str, direct: bool) -> kvtier.Manager:
    tier = {
        "type": "file",
        "path": path,
        "capacity_bytes": capacity,
        "io": io,
        "direct": "auto" if direct else False,
        # Checkpoint and journal are written while chunks are.
        "flush_interval_s": 0.01,
    }
    return kvtier.Manager(
        kvtier.Region(4 * BATCH, CHUNK), [tier], key_bytes=KEY_BYTES, namespace="crash", events=True
    )


def main() -> None:
    path, capacity, io, direct, first, end, seed = sys.argv[1:]
    numbers = range(int(first), int(end))
    manager = open_manager(path, int(capacity), io, direct == "True")
    contents = {number: content(number) for number in numbers}
    rows = np.asarray(manager.region)
    draw = random.Random(int(seed))
    print("open", flush=True)
    request = 0
    while True:
        request += 1
        batch = [key(number) for number in draw.sample(numbers, BATCH)]
        prepared = manager.prepare_store(request, batch)
        if prepared is None:
            manager.wait(1.0)
        else:
            fresh = [batch[index] for index in prepared.indices]
            for each, slot in zip(fresh, prepared.slots, strict=True):
                rows[slot] = contents[int.from_bytes(each, "big")]
            manager.complete_store(request, fresh)
        manager.request_finished(request)
        manager.end_step()
        for kind, tier, keys in manager.take_events():
            if tier == "file" and kind in ("stored", "removed"):
                word = "stored" if kind == "stored" else "gone"
                print(*(f"{word} {int.from_bytes(each, 'big')}" for each in keys), sep="\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
