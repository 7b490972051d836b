import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier.errors import LayoutError
from kvtier.torch import BlockTables

ROWS, WIDTH, BLOCK = 3, 6, 4
WRITES = st.lists(
    st.tuples(st.integers(0, ROWS - 1), st.lists(st.integers(0, 99), max_size=3) | st.none()),
    max_size=12,
)


@settings(deadline=None)
@given(WRITES, st.permutations(range(ROWS)))
def test_tables_against_plain_lists(
    writes: list[tuple[int, list[int] | None]], order: list[int]
) -> None:
    tables = BlockTables(ROWS, WIDTH, BLOCK, "cpu")
    model: list[list[int]] = [[] for _ in range(ROWS)]
    for row, ids in writes:
        if ids is None:
            tables.clear(row)
            model[row] = []
        elif len(model[row]) + len(ids) > WIDTH:
            with pytest.raises(LayoutError, match=f"row {row} has {len(model[row])} blocks"):
                tables.append(row, ids)
        else:
            tables.append(row, ids)
            model[row] += ids
    tables.apply()
    gathered = tables.gather(order)
    assert gathered.dtype == torch.int32
    assert gathered.shape == (ROWS, max(map(len, model)))
    for line, row in zip(gathered.tolist(), order, strict=True):
        assert line[: len(model[row])] == model[row]
        assert tables.num_blocks(row) == len(model[row])
        positions = np.arange(len(model[row]) * BLOCK)
        expected = [model[row][at // BLOCK] * BLOCK + at % BLOCK for at in positions.tolist()]
        assert tables.slot_mapping(row, positions).tolist() == expected


def test_readers_see_applied_writes_only() -> None:
    tables = BlockTables(1, 2, BLOCK, "cpu")
    tables.append(0, [7])
    assert tables.gather([0]).shape == (1, 0)
    with pytest.raises(LayoutError, match="positions 0 to 0 were asked for"):
        tables.slot_mapping(0, [0])
    tables.apply()
    assert tables.gather([0]).tolist() == [[7]]
    assert tables.slot_mapping(0, [3, 0]).tolist() == [31, 28]


def test_refusals_name_row_and_sizes() -> None:
    tables = BlockTables(2, 3, BLOCK, "cpu")
    tables.append(1, [1, 2])
    with pytest.raises(LayoutError, match=r"row 1 has 2 blocks and can not take 2 more.*holds 3"):
        tables.append(1, [3, 4])
    with pytest.raises(LayoutError, match="row 2 does not exist: there are 2 rows"):
        tables.append(2, [0])
    with pytest.raises(LayoutError, match="row 0: block id -5 is negative"):
        tables.append(0, [1, -5])
    tables.apply()
    with pytest.raises(LayoutError, match="covers positions 0 to 7 with 2 blocks"):
        tables.slot_mapping(1, [8])
    with pytest.raises(LayoutError, match="max_blocks = 0"):
        BlockTables(1, 0, BLOCK, "cpu")
