"""The CUDA lanes on a GPU where there is one, and registration against a driver made up here."""

import ctypes
import logging
import threading
import time
from typing import Any

import numpy as np
import pytest
import torch
from tests.torch.drawn_specs import read_page

from kvtier import Region
from kvtier.errors import DeviceError
from kvtier.torch import (
    FullAttentionSpec,
    KVCache,
    KVLayout,
    SlidingWindowSpec,
    TransferEngine,
    allocate_kv_cache,
    region_tensor,
)
from kvtier.torch.copy_paths import PiecewiseCopy
from kvtier.torch.cuda_driver import Driver
from kvtier.torch.cuda_lanes import CudaCopy, CudaLanes
from kvtier.torch.path_choice import Measured
from kvtier.torch.pinned_region import PinnedRegion

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


class MadeUpDriver:
    """Registers like a driver does; refuses from number `limit` on, and waits where it is told."""

    def __init__(self, limit: int = 99) -> None:
        self.limit = limit
        self.registered: dict[int, int] = {}
        self.calls: list[tuple[int, int]] = []
        self.contexts: list[tuple[str, int]] = []
        self.go_on = threading.Event()
        self.go_on.set()
        self.first_is_in = threading.Event()

    def context(self) -> int:
        return 77

    def use_context(self, context: int) -> None:
        self.contexts.append((threading.current_thread().name, context))

    def register(self, address: int, size: int) -> None:
        if self.calls:
            self.first_is_in.set()
            self.go_on.wait()
        self.calls.append((address, size))
        if len(self.calls) > self.limit:
            raise DeviceError("cuMemHostRegister_v2 failed with CUDA error 2 (CUDA_ERROR_NO)")
        self.registered[address] = size

    def unregister(self, address: int) -> None:
        del self.registered[address]


ROWS = torch.zeros(10, 1000, dtype=torch.uint8)


def test_a_region_is_registered_in_pieces_that_end_with_slots() -> None:
    driver = MadeUpDriver()
    pinned = PinnedRegion(ROWS, driver, piece_bytes=4999)
    assert pinned.wait() == 10
    start = ROWS.data_ptr()
    assert driver.calls == [(start, 4000), (start + 4000, 4000), (start + 8000, 2000)]
    assert driver.contexts == [("kvtier-pin", 77)]
    assert pinned.failure is None
    pinned.close()
    pinned.close()
    assert pinned.pinned_slots == 0
    assert driver.registered == {}


def test_slots_are_pinned_as_soon_as_their_piece_is() -> None:
    driver = MadeUpDriver()
    driver.go_on.clear()
    pinned = PinnedRegion(ROWS, driver, piece_bytes=3000)
    assert driver.first_is_in.wait(30)
    assert pinned.pinned_slots == 3
    driver.go_on.set()
    assert pinned.wait() == 10
    pinned.close()


def test_closing_ends_a_registration_under_way() -> None:
    driver = MadeUpDriver()
    driver.go_on.clear()
    pinned = PinnedRegion(ROWS, driver, piece_bytes=1000)
    assert driver.first_is_in.wait(30)
    closing = threading.Thread(target=pinned.close)
    closing.start()
    while not pinned._stop.is_set():
        closing.join(0.01)
    driver.go_on.set()
    closing.join(30)
    assert driver.registered == {}
    assert len(driver.calls) == 2


def test_what_the_driver_refuses_stays_pageable_and_is_said(
    caplog: pytest.LogCaptureFixture,
) -> None:
    driver = MadeUpDriver(limit=1)
    with caplog.at_level(logging.WARNING):
        pinned = PinnedRegion(ROWS, driver, piece_bytes=4000)
        assert pinned.wait() == 4
    assert "CUDA error 2" in str(pinned.failure)
    assert "4 of 10 slots of the primary region are pinned" in caplog.text
    assert "ulimit -l" in caplog.text
    pinned.close()
    assert driver.registered == {}


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a driver here")
def test_without_a_driver_the_reason_is_said() -> None:
    with pytest.raises(DeviceError, match=r"no CUDA driver: libcuda.so.1"):
        Driver()


def test_structures_have_the_size_that_the_driver_reads() -> None:
    from kvtier.torch import cuda_driver

    assert ctypes.sizeof(cuda_driver._Attributes) == 24
    assert cuda_driver._Attributes.flags.offset == 20


def test_a_copy_that_the_device_broke_off_has_ended_and_tells() -> None:
    """Whoever polls for it must get to ask for its error."""

    class Broken:
        def query(self) -> bool:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

        synchronize = query

    broken: Any = Broken()
    copy = CudaCopy(broken, broken, torch.device("cuda"), broken)
    assert copy.done()
    assert "illegal memory access" in str(copy.error)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        copy.wait()


SPECS = {
    "a": FullAttentionSpec(4, 2, 8, torch.float32),
    "b": FullAttentionSpec(4, 1, 8, torch.bfloat16, KVLayout.SPLIT_HND, scales=True),
}


def filled(where: str, seed: int) -> KVCache:
    cache = allocate_kv_cache(SPECS, 8, where)
    draw = torch.Generator().manual_seed(seed)
    for tensor in cache.canonical.tensors:
        drawn = torch.randint(-128, 128, tensor.shape, generator=draw, dtype=torch.int8)
        tensor.copy_(drawn)
    return cache


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("name", ["batched memcpy", "kernel", "staging", "piecewise", "pageable"])
def test_slots_have_the_same_bytes_as_on_the_host(name: str) -> None:
    device, host = filled("cuda", 0), filled("cpu", 0)
    regions = [Region(3, device.page_bytes * 2) for _ in range(2)]
    ids, back = np.array([[5, 1], [0, 7]]), np.array([[2, 3], [4, 6]])
    with (
        TransferEngine(regions[0], device, 2) as engine,
        TransferEngine(regions[1], host, 2) as on_host,
    ):
        lanes = engine.lanes
        assert isinstance(lanes, CudaLanes)
        assert lanes.pinned.wait() == 3, lanes.pinned.failure
        if name == "pageable":
            lanes.pinned.close()
        for ways in lanes.measured.values():
            ways.append(Measured(PiecewiseCopy(), 1.0, 1))
            fitting = [way.path.name for way in ways]
            assert len(fitting) >= 3, "Triton and a driver of CUDA 12.8 are expected here"
            if name in fitting:  # staging does not fit stores that leave gaps
                ways.insert(0, ways.pop(fitting.index(name)))
        # What the compute stream has queued is part of the store.
        for tensor in (*device.canonical.tensors, *host.canonical.tensors):
            tensor[5] += 1
        engine.wait(engine.store(ids, [2, 0]))
        on_host.wait(on_host.store(ids, [2, 0]))
        assert torch.equal(*map(region_tensor, regions))
        # No wait on the host: only the compute stream is ordered behind the load.
        job = engine.load(back, [2, 0], expedited=True)
        job.before_compute()
        loaded = [tensor[[2, 3, 4, 6]].cpu() for tensor in device.canonical.tensors]
        assert job.seconds >= 0
        assert job.error is None
        for got, theirs in zip(loaded, host.canonical.tensors, strict=True):
            assert torch.equal(got, theirs[[5, 1, 0, 7]])


@pytest.mark.gpu
@needs_gpu
def test_groups_first_and_last_chunks_and_order_on_the_device() -> None:
    specs = {
        "a": FullAttentionSpec(4, 2, 8, torch.bfloat16),
        "w": SlidingWindowSpec(4, 1, 8, torch.bfloat16, window=5),
    }
    cache = allocate_kv_cache(specs, 16, "cuda")
    for tensor in cache.canonical.tensors:
        tensor.copy_(torch.randint(-128, 128, tensor.shape, dtype=torch.int8))
    expected = [read_page(cache.canonical, 1, "w", block).cpu() for block in (9, 3, 11)]
    region = Region(4, 2 * cache.page_bytes)
    with TransferEngine(region, cache, 2) as engine:
        engine.store([9, 3, 11], [3, 1], group=1, first=1)
        engine.load([0, 1, 2], [3, 1], group=1, first=1)
        engine.store([0, 1, 2], [0, 2], group=1, first=1)
        engine.load([4, 5, 6], [0, 2], group=1, first=1, expedited=True).before_compute()
        got = [read_page(cache.canonical, 1, "w", block).cpu() for block in (4, 5, 6)]
    assert all(torch.equal(one, other) for one, other in zip(got, expected, strict=True))


@pytest.mark.gpu
@needs_gpu
def test_jobs_begin_between_submission_and_end_on_the_host_s_clock() -> None:
    cache = filled("cuda", 0)
    slack = 0.001  # single precision of a pause, and the device's own tick
    with TransferEngine(Region(3, cache.page_bytes * 2), cache, 2) as engine:
        for slots in ([0, 1], [1, 2], [2, 0]):
            submitted = time.monotonic()
            job = engine.store([[5, 1], [0, 7]], slots)
            engine.wait(job)
            assert submitted - slack <= job.began
            assert job.began + job.seconds <= time.monotonic() + slack
