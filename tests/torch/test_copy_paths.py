"""Every copy path moves the bytes that the Rust copier moves; here all of them on CPU tensors."""

import ctypes
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from tests.torch.drawn_specs import Drawn, caches, fill, pages_of
from tests.torch.interpreted import compiled, interpreted

from kvtier import Moves, Region
from kvtier.errors import DeviceError
from kvtier.torch import KVCache, TensorParallel, TransferEngine, copy_kernel, region_tensor
from kvtier.torch.chunk_layout import GroupLayout, Piece, chunk_layout
from kvtier.torch.copy_paths import (
    BatchedMemcpy,
    CopyPath,
    GroupTable,
    KernelCopy,
    PiecewiseCopy,
    StagedCopy,
    move_table,
)
from kvtier.torch.path_choice import choose_paths

BLOCKS, SLOTS = 6, 7


class Memmove:
    """Does what the driver's batched memcpy does, at once, on host memory."""

    has_batched_memcpy = True

    def __init__(self) -> None:
        self.orders: list[int] = []

    def memcpy_batch(
        self,
        targets: NDArray[np.int64],
        sources: NDArray[np.int64],
        sizes: NDArray[np.int64],
        *,
        source_order: int,
        stream: int,
    ) -> None:
        del stream
        self.orders.append(source_order)
        for array in (targets, sources, sizes):
            assert array.dtype == np.int64
            assert array.flags.c_contiguous
        for target, source, size in zip(targets, sources, sizes, strict=True):
            ctypes.memmove(int(target), int(source), int(size))


MAKE: dict[str, Callable[[], CopyPath]] = {
    "batched memcpy": lambda: BatchedMemcpy(Memmove(), 1, 3),
    "kernel": lambda: KernelCopy(3),
    "staging": lambda: StagedCopy(64, 3),  # rounds of one chunk each
    "piecewise": PiecewiseCopy,
}


@pytest.fixture(autouse=True)
def _interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copy_kernel, "copy_blocks", interpreted(copy_kernel.copy_blocks))


def copy(path: CopyPath, table: GroupTable, moves: Moves, slots: torch.Tensor) -> None:
    path.copy(
        table,
        move_table(moves, table.blocks_per_chunk),
        slots,
        to_slots=moves.to_slots,
        sources_ready=True,
        stream=0,
    )


def same(cache: KVCache, other: KVCache) -> bool:
    return all(pages_of(cache, block) == pages_of(other, block) for block in range(BLOCKS))


@pytest.mark.parametrize("name", list(MAKE))
@settings(max_examples=40)
@given(
    drawn=caches(),
    data=st.data(),
    per_chunk=st.integers(1, 3),
    parallel=st.sampled_from([None, TensorParallel(1, 0), TensorParallel(3, 1)]),
)
def test_a_path_moves_what_the_copier_moves(
    name: str, drawn: Drawn, data: st.DataObject, per_chunk: int, parallel: TensorParallel | None
) -> None:
    ours, theirs = drawn.allocate(BLOCKS), drawn.allocate(BLOCKS)
    group = data.draw(st.integers(0, len(ours.groups) - 1))
    ids = data.draw(st.lists(st.integers(0, BLOCKS - 1), max_size=BLOCKS, unique=True))
    first = data.draw(st.integers(0, per_chunk - 1))
    chunks = -(-(first + len(ids)) // per_chunk) if ids else 0
    slots = data.draw(st.permutations(range(SLOTS)))[:chunks]
    path = MAKE[name]()
    layout = chunk_layout(ours.canonical, parallel).groups[group]
    table = GroupTable(ours.canonical.tensors, layout, per_chunk)
    regions = [Region(SLOTS, ours.page_bytes * per_chunk) for _ in range(2)]
    rows, reference = map(region_tensor, regions)
    with TransferEngine(regions[1], theirs, per_chunk, tensor_parallel=parallel) as engine:
        for to_slots in (True, False):
            if not path.fits(table, to_slots=to_slots, pinned=True):
                assert name == "staging"
                assert to_slots
                continue
            fill(ours, 5)
            fill(theirs, 5)
            rows.copy_(torch.randint(0, 256, rows.shape, dtype=torch.uint8))
            reference.copy_(rows)
            moves = Moves(
                np.array(ids, np.int64),
                np.array(slots, np.int64),
                to_slots=to_slots,
                num_blocks=BLOCKS,
                num_slots=SLOTS,
                blocks_per_chunk=per_chunk,
                first=first,
            )
            verb = engine.store if to_slots else engine.load
            engine.wait(verb(ids, slots, group=group, first=first))
            copy(path, table, moves, rows)
            assert torch.equal(rows, reference)
            assert same(ours, theirs)


@pytest.mark.parametrize("name", list(MAKE))
def test_a_slot_may_be_loaded_twice(name: str) -> None:
    table = small_table()
    slots = torch.arange(2 * 96, dtype=torch.uint8).view(2, 96)
    moves = Moves(
        np.array([0, 1, 2, 3]),
        np.array([1, 1, 0]),
        to_slots=False,
        num_blocks=8,
        num_slots=2,
        blocks_per_chunk=2,
        first=1,
    )
    copy(MAKE[name](), table, moves, slots)
    loaded = table.tensors[0].view(torch.uint8)[:4]
    places = [slots[1, 48:], slots[1, :48], slots[1, 48:], slots[0, :48]]
    for row, place in zip(loaded, places, strict=True):
        assert torch.equal(row[:32], place[:32])
        assert torch.equal(row[48:], place[32:])


def small_table() -> GroupTable:
    pieces = (Piece(0, 0, 32, 0), Piece(0, 48, 16, 32))
    return GroupTable([torch.zeros(8, 64, dtype=torch.int8)], GroupLayout(48, pieces), 2)


def test_a_store_through_staging_must_write_whole_blocks() -> None:
    table = small_table()
    assert table.is_dense
    shared = GroupLayout(48, (Piece(0, 0, 48, 0, turns=2),))
    gap = GroupLayout(50, table.layout.pieces)
    for layout in (shared, gap):
        other = GroupTable(table.tensors, layout, 2)
        assert not other.is_dense
        assert not StagedCopy(1, 1).fits(other, to_slots=True, pinned=True)
        assert StagedCopy(1, 1).fits(other, to_slots=False, pinned=False)


def test_pageable_slots_need_staging_or_single_copies() -> None:
    table = small_table()
    fitting = {
        name for name, make in MAKE.items() if make().fits(table, to_slots=True, pinned=False)
    }
    assert fitting == {"staging", "piecewise"}


def test_sources_are_read_early_only_where_nothing_writes_them() -> None:
    driver = Memmove()
    path = BatchedMemcpy(driver, 1, 3)
    table = small_table()
    for to_slots in (True, False):
        for ready in (True, False):
            path.copy(
                table,
                np.zeros((1, 4), np.int64),
                torch.zeros(1, 96, dtype=torch.uint8),
                to_slots=to_slots,
                sources_ready=ready,
                stream=0,
            )
    assert driver.orders == [1, 1, 3, 1]


def test_the_fastest_path_comes_first_and_broken_ones_are_left_out(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Broken(Memmove):
        def memcpy_batch(self, *_arrays: object, **_how: object) -> None:
            raise DeviceError("not on this machine")

    table = small_table()
    # Stores: best of three 2, then 5; loads: 9, then 8.
    seconds = iter([3.0, 2.0, 4.0, 5.0, 6.0, 7.0, 9.0, 9.0, 9.0, 8.0, 8.0, 8.0])

    def timer(run: Callable[[], None]) -> float:
        run()
        return next(seconds)

    slow, fast = BatchedMemcpy(Memmove(), 1, 3), BatchedMemcpy(Memmove(), 1, 3)
    layouts = [table.layout, table.layout]  # alike: measured once
    paths = [BatchedMemcpy(Broken(), 1, 3), fast, slow]
    device = torch.device("cpu")

    chosen = choose_paths(paths, layouts, [64], 2, device, 0, timer)
    assert chosen.keys() == {(0, True), (0, False), (1, True), (1, False)}
    assert [one.path for one in chosen[1, True]] == [fast, slow]
    assert [one.path for one in chosen[0, False]] == [slow, fast]
    assert chosen[0, True][0].seconds == 2.0
    assert "batched memcpy does not work here: not on this machine" in caplog.text


@pytest.mark.parametrize("capability", [80, 90, 100])
@pytest.mark.parametrize("to_slots", [True, False])
def test_the_kernel_compiles_to_the_widest_accesses(capability: int, to_slots: bool) -> None:
    from triton.runtime.interpreter import InterpretedFunction

    kernel = copy_kernel.copy_blocks
    if isinstance(kernel, InterpretedFunction):
        import triton

        kernel = triton.runtime.jit.JITFunction(kernel.fn)
    types = {"moves": "*i64", "pieces": "*i64", "num_moves": "i32", "num_pieces": "i32"}
    constants = {"TO_SLOTS": to_slots, "ALIGNMENT": 16, "WORDS": 1024}
    code = compiled(kernel, capability, types, constants).asm["ptx"]
    assert "st.global.v2.b64" in code
    assert "ld.global.v2.b64" in code
