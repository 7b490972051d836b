"""Block tables against plain lists, on the host and with the Triton kernel in its interpreter."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.torch.interpreted import compiled, interpreted

from kvtier.errors import LayoutError
from kvtier.torch import (
    PAD_SLOT,
    BlockTables,
    ContextParallel,
    FullAttentionSpec,
    MambaSpec,
    TableGroup,
    block_table_kernel,
    make_groups,
)
from kvtier.torch.block_table import _open_runner
from kvtier.torch.block_table_kernel import KernelRunner

ROWS, TOKENS = 4, 24
RUNNERS = ["host", "kernel"]


@pytest.fixture(autouse=True)
def _interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        block_table_kernel, "step_tables", interpreted(block_table_kernel.step_tables)
    )


def make(
    runner: str,
    groups: list[TableGroup],
    parallel: ContextParallel | None = None,
    capacity: int | None = None,
) -> BlockTables:
    tables = BlockTables(groups, ROWS, TOKENS, "cpu", context_parallel=parallel)
    if capacity is not None:
        tables._capacity = capacity
    if runner == "kernel":
        tables._runner = KernelRunner(tables._state, tables._capacity)
    return tables


class Model:
    """The same as lists of blocks and a loop over tokens."""

    def __init__(self, groups: list[TableGroup], parallel: ContextParallel) -> None:
        self.groups = groups
        self.parallel = parallel
        self.blocks: list[list[list[int]]] = [[[] for _ in range(ROWS)] for _ in groups]

    def kernel_row(self, group: int, row: int) -> list[int]:
        ratio = self.groups[group].ratio
        return [block * ratio + part for block in self.blocks[group][row] for part in range(ratio)]

    def slot(self, number: int, row: int, position: int) -> int:
        group, parallel = self.groups[number], self.parallel
        if not group.maps_slots:
            return PAD_SLOT
        if group.context_parallel and parallel.size > 1:
            # Tokens of this rank in the order of their positions, counted one by one.
            owner = position // parallel.interleave % parallel.size
            if owner != parallel.rank:
                return PAD_SLOT
            position = sum(
                earlier // parallel.interleave % parallel.size == owner
                for earlier in range(position)
            )
        block, offset = divmod(position, group.block_size)
        if block >= len(self.blocks[number][row]):
            return PAD_SLOT
        return self.blocks[number][row][block] * group.block_size + offset


@st.composite
def setups(draw: st.DrawFn) -> tuple[list[TableGroup], ContextParallel]:
    size = draw(st.integers(1, 3))
    parallel = ContextParallel(
        size, draw(st.integers(0, size - 1)), draw(st.sampled_from([1, 2, 4]))
    )
    groups = [
        TableGroup(
            block_size=draw(st.sampled_from([4, 8])),
            max_blocks=draw(st.integers(1, 5)),
            kernel_block_size=draw(st.sampled_from([None, 1, 4])),
            maps_slots=draw(st.integers(0, 3)) > 0,
            context_parallel=draw(st.booleans()),
        )
        for _ in range(draw(st.integers(1, 3)))
    ]
    return groups, parallel


@pytest.mark.parametrize("runner", RUNNERS)
@settings(max_examples=60)
@given(setup=setups(), data=st.data())
def test_tables_against_plain_lists(
    runner: str, setup: tuple[list[TableGroup], ContextParallel], data: st.DataObject
) -> None:
    groups, parallel = setup
    tables, model = make(runner, groups, parallel), Model(groups, parallel)
    for _ in range(data.draw(st.integers(1, 3))):
        for _ in range(data.draw(st.integers(0, 4))):
            row = data.draw(st.integers(0, ROWS - 1))
            if data.draw(st.booleans()):
                tables.clear(row)
                for rows in model.blocks:
                    rows[row] = []
                continue
            more = [
                data.draw(st.lists(st.integers(0, 99), max_size=group.max_blocks - len(rows[row])))
                for group, rows in zip(groups, model.blocks, strict=True)
            ]
            tables.append(row, more)
            for rows, ids in zip(model.blocks, more, strict=True):
                rows[row] += ids
        batch = data.draw(st.permutations(range(ROWS)))[: data.draw(st.integers(0, ROWS))]
        padded_rows = data.draw(st.integers(len(batch), ROWS))
        lengths = [data.draw(st.integers(0, 5)) for _ in batch]
        starts = torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32)
        positions = [data.draw(st.integers(-1, 60)) for _ in range(sum(lengths))]
        padded_tokens = data.draw(st.integers(max(1, sum(lengths)), TOKENS))
        gathered, slots = tables.step(
            batch,
            starts,
            torch.tensor(positions, dtype=torch.int64),
            padded_rows=padded_rows,
            padded_tokens=padded_tokens,
        )
        for number, table in enumerate(gathered):
            assert table.dtype == torch.int32
            assert table.shape == (padded_rows, groups[number].max_blocks * groups[number].ratio)
            for line, row in zip(table.tolist(), batch, strict=False):
                known = model.kernel_row(number, row)
                assert line[: len(known)] == known
            assert not table[len(batch) :].any()
        rows_of = [row for row, length in zip(batch, lengths, strict=True) for _ in range(length)]
        for number in range(len(groups)):
            expected = [
                PAD_SLOT if position < 0 else model.slot(number, row, position)
                for row, position in zip(rows_of, positions, strict=True)
            ]
            expected += [PAD_SLOT] * (padded_tokens - len(expected))
            assert slots[number].tolist() == expected


@pytest.mark.parametrize("runner", RUNNERS)
def test_more_than_fits_into_one_upload_goes_ahead(runner: str) -> None:
    tables = make(runner, [TableGroup(4, 5), TableGroup(4, 3)], capacity=8)
    rows = [[list(range(10 * row, 10 * row + 5)), [row, row, row]] for row in range(ROWS)]
    for row, blocks in enumerate(rows):
        tables.append(row, blocks)
    first, second = tables.gather([3, 0, 2, 1])
    assert first.tolist() == [rows[row][0] for row in (3, 0, 2, 1)]
    assert second.tolist() == [rows[row][1] for row in (3, 0, 2, 1)]


@pytest.mark.parametrize("runner", RUNNERS)
def test_results_never_move(runner: str) -> None:
    tables = make(runner, [TableGroup(4, 5)])
    tables.append(1, [[7]])
    positions = torch.zeros(1, dtype=torch.int64)
    starts = torch.tensor([0, 1], dtype=torch.int32)
    (table,), slots = tables.step([1], starts, positions)
    tables.append(1, [[8]])
    # A captured graph is this alone, replayed with other contents of the same tensors.
    tables.stage_step([1], None, 1)
    positions.fill_(5)
    tables.run_step(starts, positions)
    assert table[0, :2].tolist() == [7, 8]
    assert slots.tolist() == [[8 * 4 + 1]]
    tables.clear(1)
    tables.apply()
    assert tables.num_blocks(1) == 0


def test_many_requests_are_staged_at_once() -> None:
    groups = [TableGroup(4, 5), TableGroup(8, 4)]
    one_by_one, at_once = make("host", groups), make("host", groups)
    one_by_one.append(2, [[1, 2], []])
    one_by_one.append(0, [[3], [4, 5, 6]])
    at_once.append_many([2, 0], [[2, 1], [0, 3]], [1, 2, 3, 4, 5, 6])
    for left, right in zip(one_by_one.gather([0, 2]), at_once.gather([0, 2]), strict=True):
        assert torch.equal(left, right)
    assert [at_once.num_blocks(2, group) for group in (0, 1)] == [2, 0]


def refusals() -> list[tuple[Callable[[BlockTables], object], str]]:
    starts, positions = torch.zeros(2, dtype=torch.int32), torch.zeros(1, dtype=torch.int64)
    return [
        (
            lambda t: t.append(1, [[3], [1, 2]]),
            "row 1, group 1: it has 2 blocks and can not take 2 more: a row holds 3",
        ),
        (lambda t: t.append(1, [[3], [-5]]), "row 1, group 1: block id -5 is negative"),
        (lambda t: t.append(1, [[2**31], []]), "block id 2147483648 is too large"),
        (lambda t: t.append(1, [[3]]), "1 lists of blocks for 2 groups"),
        (lambda t: t.append(4, [[], []]), "row 4 does not exist: there are 4 rows"),
        (lambda t: t.clear(-1), "row -1 does not exist"),
        (lambda t: t.append_many([1, 1], [[1, 0], [0, 0]], [1]), "row 1 is given twice"),
        (lambda t: t.append_many([1], [[1], [0]], [1, 2]), "sum up to 1 for 2 block ids"),
        (lambda t: t.append_many([1], [[1]], [1]), r"counts of shape \(1, 1\).*\(2, 1\)"),
        (lambda t: t.gather([1, 1]), "row 1 is given twice"),
        (lambda t: t.gather([0, 1], 1), "2 requests padded to 1 rows"),
        (lambda t: t.gather([0], 5), "1 requests padded to 5 rows: there are 4"),
        (lambda t: t.stage_step([0], None, TOKENS + 1), "25 tokens.*room for 24"),
        (lambda t: t.step([0, 1], starts, positions), "2 requests need 3 query_starts, not 2"),
        (lambda t: t.step([1], starts.long(), positions), "query_starts is torch.int64"),
        (lambda t: t.run_step(starts.long(), positions), "query_starts is torch.int64"),
        (lambda t: t.run_step(starts, positions.int()), "positions is torch.int32"),
        (lambda t: t.run_step(starts.to("meta"), positions), "on meta, but must be torch.int32"),
    ]


@pytest.mark.parametrize(("call", "complaint"), refusals())
def test_refusals_name_request_group_and_sizes_and_change_nothing(
    call: Callable[[BlockTables], object], complaint: str
) -> None:
    tables = make("host", [TableGroup(4, 5), TableGroup(4, 3)])
    tables.append(1, [[9], [7, 8]])
    with pytest.raises(LayoutError, match=complaint):
        call(tables)
    assert [tables.num_blocks(1, group) for group in (0, 1)] == [1, 2]
    first, second = tables.gather([1])
    assert first[0, :1].tolist() == [9]
    assert second[0, :2].tolist() == [7, 8]


@pytest.mark.parametrize(
    ("groups", "parallel", "complaint"),
    [
        ([], ContextParallel(), "groups = 0"),
        ([TableGroup(4, 0)], ContextParallel(), "group 0: max_blocks = 0"),
        ([TableGroup(4, 1, 3)], ContextParallel(), "kernel blocks of 3 tokens do not divide"),
        ([TableGroup(4, 1)], ContextParallel(2, 0, 3), "an interleave of 3 tokens"),
    ],
)
def test_tables_that_can_not_be_are_refused(
    groups: list[TableGroup], parallel: ContextParallel, complaint: str
) -> None:
    with pytest.raises(LayoutError, match=complaint):
        BlockTables(groups, 1, 1, "cpu", context_parallel=parallel)
    with pytest.raises(LayoutError, match="rank 2 of 2"):
        ContextParallel(2, 2)


def test_the_table_that_a_group_needs() -> None:
    full = FullAttentionSpec(16, 1, 1, torch.int8)
    states = MambaSpec(16, ((1,),), (torch.int8,))
    specs = {"a": full, "m": states}
    attention, mamba = make_groups([["a"], ["m"]], specs, kernel_block_sizes=[4, None])
    parallel = ContextParallel(2, 1)
    assert TableGroup.of(attention, 100) == TableGroup(16, 7, 4)
    assert TableGroup.of(attention, 100, parallel) == TableGroup(16, 4, 4)
    assert TableGroup.of(mamba, 100, parallel) == TableGroup(16, 7, 16, False, False)


def test_each_kind_of_device_has_its_runner() -> None:
    tables = make("host", [TableGroup(4, 1)])
    assert type(_open_runner(tables._state, 1)).__name__ == "HostRunner"


@pytest.mark.parametrize("capability", [80, 90, 100])
@pytest.mark.parametrize("ranks", [1, 2])
def test_the_kernel_compiles_and_copies_rows_in_the_widest_words(
    capability: int, ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from triton.runtime.jit import JITFunction

    monkeypatch.undo()
    kernel = JITFunction(block_table_kernel.step_tables.fn)
    types = {
        "work": "*i32",
        "meta": "*i64",
        "slots": "*i64",
        "query_starts": "*i32",
        "positions": "*i64",
        "rank": "i32",
    }
    constants = {
        "MAX_REQUESTS": 256,
        "GROUPS": 4,
        "GATHER": True,
        "MAPS": True,
        "RANKS": ranks,
        "INTERLEAVE": 1,
        "PAD": PAD_SLOT,
        "HEADER": 4,
        "META": 8,
        "WIDTH": 1024,
    }
    code = compiled(kernel, capability, types, constants).asm["ptx"]
    assert "bar.sync" in code  # between writing a row and reading it
    assert "ld.global.v4.b32" in code
    assert "st.global.v4.b32" in code


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_device_and_the_host_agree_also_in_a_captured_graph() -> None:
    groups = [TableGroup(16, 40, 8), TableGroup(32, 20), TableGroup(64, 10, None, False)]
    draw = np.random.default_rng(0)
    host, device = (BlockTables(groups, 64, 4096, where) for where in ("cpu", "cuda"))
    starts = torch.zeros(65, dtype=torch.int32, device="cuda")
    positions = torch.zeros(4096, dtype=torch.int64, device="cuda")
    graph: torch.cuda.CUDAGraph | None = None
    for _ in range(8):
        rows = draw.permutation(64)[:30]
        for tables in (host, device):
            tables.clear(rows.tolist())
        counts = np.stack([draw.integers(1, group.max_blocks, 30) for group in groups])
        ids = draw.integers(0, 1000, counts.sum())
        for tables in (host, device):
            tables.append_many(rows, counts, ids)
        batch = draw.permutation(64)[:48].tolist()
        lengths = draw.integers(0, 80, 48)
        ends = torch.from_numpy(np.cumsum(lengths)).int()
        where = torch.from_numpy(draw.integers(0, 700, int(ends[-1])))
        starts.zero_()
        starts[1:49] = ends.cuda()
        positions[: len(where)] = where.cuda()
        wanted, slots = host.step(
            batch, starts.cpu()[:49], where, padded_rows=64, padded_tokens=4096
        )
        device.stage_step(batch, 64, 4096)
        if graph is None:
            device.run_step(starts, positions)  # compiles
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                device.run_step(starts, positions)
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(device._state.slots.cpu(), slots)
        for number, (got, table) in enumerate(zip(device._state.batch, wanted, strict=True)):
            for line, row in enumerate(batch):
                used = host.num_blocks(row, number) * groups[number].ratio
                assert torch.equal(got[line, :used].cpu(), table[line, :used])
            assert not got[48:].any()
