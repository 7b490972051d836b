"""The CUDA lane: on a GPU where there is one, and its registration without one."""

import numpy as np
import pytest
import torch

from kvtier import Region
from kvtier.torch import FullAttentionSpec, TransferEngine, allocate_kv_cache, cuda_lane
from kvtier.torch.cuda_lane import PinnedRegion

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


class FakeRuntime:
    """Counts registrations; refuses all from number `limit` on."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.registered: list[int] = []
        self.calls: list[tuple[int, int]] = []

    def cudaHostRegister(self, address: int, size: int, _flags: int) -> int:
        self.calls.append((address, size))
        if len(self.calls) > self.limit:
            return 2
        self.registered.append(address)
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        self.registered.remove(address)
        return 0


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Pieces of 4096 bytes; returns the list of errors that were cleared."""
    cleared: list[str] = []
    monkeypatch.setattr(cuda_lane, "_REGISTER_PIECE_BYTES", 4096)
    monkeypatch.setattr(cuda_lane, "_clear_cuda_error", lambda: cleared.append("cleared"))
    return cleared


def test_a_region_is_registered_in_pieces(
    monkeypatch: pytest.MonkeyPatch, small_pieces: list[str]
) -> None:
    runtime = FakeRuntime(limit=9)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    rows = torch.zeros(10_000, dtype=torch.uint8)
    pinned = PinnedRegion(rows)
    assert pinned.pinned
    start = rows.data_ptr()
    assert runtime.calls == [(start, 4096), (start + 4096, 4096), (start + 8192, 1808)]
    pinned.close()
    pinned.close()
    assert runtime.registered == []
    assert not small_pieces


def test_a_refused_registration_is_undone_cleared_and_reported(
    monkeypatch: pytest.MonkeyPatch, small_pieces: list[str]
) -> None:
    runtime = FakeRuntime(limit=2)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    with pytest.warns(RuntimeWarning, match="CUDA error 2: transfers use pageable memory"):
        pinned = PinnedRegion(torch.zeros(10_000, dtype=torch.uint8))
    assert not pinned.pinned
    assert runtime.registered == []
    assert small_pieces == ["cleared"]


@pytest.mark.gpu
@needs_gpu
def test_slots_have_the_same_layout_as_on_the_host() -> None:
    specs = {
        "a": FullAttentionSpec(4, 2, 8, torch.float32),
        "b": FullAttentionSpec(4, 1, 8, torch.bfloat16),
    }
    device, host = (allocate_kv_cache(specs, 8, where) for where in ("cuda", "cpu"))
    draw = torch.Generator().manual_seed(0)
    for ours, theirs in zip(device.canonical, host.canonical, strict=True):
        theirs.copy_(torch.randint(-128, 128, theirs.shape, generator=draw, dtype=torch.int8))
        ours.copy_(theirs)
    region = Region(3, device.page_bytes * 2)
    ids, back = np.array([[5, 1], [0, 7]]), np.array([[2, 3], [4, 6]])
    with TransferEngine(region, device, 2) as engine, TransferEngine(region, host, 2) as reference:
        # What the compute stream has queued is part of the store.
        for tensor in (*device.canonical, *host.canonical):
            tensor[5] += 1
        engine.wait(engine.store(ids, [2, 0]))
        stored = np.asarray(region).copy()
        reference.wait(reference.store(ids, [2, 0]))
        assert np.array_equal(stored, np.asarray(region))
        # No wait here: the compute stream is ordered behind the load.
        job = engine.load(back, [2, 0])
        loaded = [tensor[[2, 3, 4, 6]].cpu() for tensor in device.canonical]
        assert job.bytes == 2 * engine.chunk_bytes
        assert job.seconds >= 0
        for got, theirs in zip(loaded, host.canonical, strict=True):
            assert torch.equal(got, theirs[[5, 1, 0, 7]])
