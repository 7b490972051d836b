"""Block tables that stay on the device: row = request, column = position in its blocks.

The scheduler stages what changes on the host as it happens; once a step, all of it crosses to the
device in one copy, and one launch writes it into the tables, gathers the tables of the batch, and
maps the batch's tokens to their slots. On CPU, torch operations do the same
(`kvtier.torch.block_table_host`); on CUDA a Triton kernel (`kvtier.torch.block_table_kernel`).

Blocks are staged as the engine names them; the tables hold kernel blocks: block `b` of a group
with `k` kernel blocks a block becomes `b * k .. b * k + k - 1`. Sizes and ids are checked on the
host; nothing waits for the device.

Memory: 4 bytes an entry, three times: tables and the batch's tables on the device, and a copy on
the host, from which staged ranges are taken.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from kvtier.errors import LayoutError
from kvtier.torch.block_table_work import HEADER, StepWork, fixed_entries, ragged_index
from kvtier.torch.groups import CacheGroup

__all__ = ["PAD_SLOT", "BlockTables", "ContextParallel", "TableGroup", "TableState"]

PAD_SLOT = -1
"""Slot of a token that has none here: padding, another rank's, or past the blocks of its row."""

_MAX_ENTRY = np.iinfo(np.int32).max
_CLEAN = _MAX_ENTRY
_ROW_ALIGNMENT = 32  # entries: rows start at cache lines
_MIN_STAGED = 1 << 15


@dataclass(frozen=True)
class ContextParallel:
    """How the tokens of a request are dealt over ranks: `interleave` to each in turn."""

    size: int = 1
    rank: int = 0
    interleave: int = 1

    def __post_init__(self) -> None:
        """Raises `LayoutError` for a rank that does not exist."""
        if self.size < 1 or not 0 <= self.rank < self.size or self.interleave < 1:
            raise LayoutError(
                f"rank {self.rank} of {self.size} context-parallel ranks with an interleave of "
                f"{self.interleave} is not possible"
            )


@dataclass(frozen=True)
class TableGroup:
    """The table of one KV cache group."""

    block_size: int
    max_blocks: int
    """Blocks of one request on this rank."""
    kernel_block_size: int | None = None
    """Tokens of the blocks in the table; None: `block_size`."""
    maps_slots: bool = True
    """Whether tokens have slots; states have none."""
    context_parallel: bool = True
    """Whether context parallelism deals out the tokens; states are on every rank."""

    @classmethod
    def of(
        cls, group: CacheGroup, max_tokens: int, context_parallel: ContextParallel | None = None
    ) -> TableGroup:
        """The table that requests of up to `max_tokens` tokens need in `group`."""
        states = not group.has_tokens
        ranks = 1 if states or context_parallel is None else context_parallel.size
        return cls(
            block_size=group.block_size,
            max_blocks=-(-max_tokens // (group.block_size * ranks)),
            kernel_block_size=group.kernel_block_size,
            maps_slots=not states,
            context_parallel=not states,
        )

    @property
    def kernel_size(self) -> int:
        """Tokens of the blocks in the table."""
        return self.block_size if self.kernel_block_size is None else self.kernel_block_size

    @property
    def ratio(self) -> int:
        """Kernel blocks of a block."""
        return self.block_size // self.kernel_size


@dataclass(frozen=True)
class TableState:
    """What lives on the device, at addresses that never change."""

    groups: tuple[TableGroup, ...]
    context_parallel: ContextParallel
    max_requests: int
    tables: tuple[torch.Tensor, ...]
    """int32 `(max_requests, max_blocks * ratio)` of each group, rows aligned."""
    batch: tuple[torch.Tensor, ...]
    """The same, in the order of the batch."""
    slots: torch.Tensor
    """int64 `(groups, max_tokens)`."""


class StepRunner(Protocol):
    """Does a step's work on one kind of device."""

    def upload(self, work: StepWork) -> None:
        """Brings the work to the device."""

    def run(
        self,
        *,
        gather: bool,
        query_starts: torch.Tensor | None,
        positions: torch.Tensor | None,
    ) -> None:
        """Does what was uploaded: staged writes, the batch's tables, its slots."""


class BlockTables:
    """Tables of all groups of a KV cache. One thread stages and applies; not for several."""

    def __init__(
        self,
        groups: Sequence[TableGroup],
        max_requests: int,
        max_tokens: int,
        device: torch.device | str,
        *,
        context_parallel: ContextParallel | None = None,
    ) -> None:
        """Tables of `max_requests` rows, and slots for batches of up to `max_tokens` tokens.

        Raises `LayoutError` for a size below 1, kernel blocks that do not divide blocks, and an
        interleave that does not divide them.
        """
        parallel = context_parallel or ContextParallel()
        _check_sizes(groups, max_requests, max_tokens, parallel)
        self._widths = np.array([group.max_blocks for group in groups], np.int64)
        self._state = _make_state(tuple(groups), max_requests, max_tokens, device, parallel)
        # The host's copy of the tables, one group behind the other, in blocks.
        self._firsts = np.concatenate([[0], np.cumsum(self._widths * max_requests)])[:-1]
        self._ids = np.zeros(int((self._widths * max_requests).sum()), np.int32)
        self._lengths = np.zeros((len(groups), max_requests), np.int32)
        self._staged_from = np.full_like(self._lengths, _CLEAN)
        self._changed = np.zeros(max_requests, bool)
        self._capacity = max(_MIN_STAGED, int(self._widths.sum()))
        self._runner = _open_runner(self._state, self._capacity)

    @property
    def groups(self) -> tuple[TableGroup, ...]:
        """The groups, in the order of their indices."""
        return self._state.groups

    @property
    def max_requests(self) -> int:
        """Number of rows."""
        return self._state.max_requests

    @property
    def device(self) -> torch.device:
        """Where the tables live."""
        return self._state.slots.device

    def num_blocks(self, row: int, group: int = 0) -> int:
        """Blocks of `row`, staged ones included."""
        self._check_rows(np.array([row]))
        return int(self._lengths[group, row])

    def append(self, row: int, blocks: Sequence[Sequence[int]]) -> None:
        """Stages `blocks[group]` behind the blocks that `row` has in each group."""
        if len(blocks) != len(self.groups):
            raise LayoutError(f"{len(blocks)} lists of blocks for {len(self.groups)} groups")
        counts = [[len(ids)] for ids in blocks]
        self.append_many([row], counts, np.concatenate([np.asarray(ids, int) for ids in blocks]))

    def append_many(self, rows: ArrayLike, counts: ArrayLike, block_ids: ArrayLike) -> None:
        """Stages blocks of many requests: `counts[group][i]` more for row `rows[i]`.

        `block_ids` has them all: group by group, and in each by `i`. Raises `LayoutError`, with
        nothing staged, for a row that does not exist or is given twice, a negative id, or more
        blocks than a row holds; the message names the request's row, the group and the sizes.
        """
        at = np.asarray(rows, np.int64).reshape(-1)
        more = np.asarray(counts, np.int64)
        ids = np.asarray(block_ids, np.int64).reshape(-1)
        self._check_rows(at)
        self._check_appended(at, more, ids)
        before = self._lengths[:, at].astype(np.int64)
        firsts = self._firsts[:, None] + at * self._widths[:, None] + before
        self._ids[ragged_index(firsts.reshape(-1), more.reshape(-1))] = ids
        self._lengths[:, at] = before + more
        self._staged_from[:, at] = np.minimum(self._staged_from[:, at], before)
        self._changed[at] = True

    def clear(self, rows: int | Sequence[int]) -> None:
        """Forgets the blocks of rows, staged or applied; the rows can be used again."""
        at = np.asarray(rows, np.int64).reshape(-1)
        self._check_rows(at)
        self._lengths[:, at] = 0
        self._staged_from[:, at] = 0
        self._changed[at] = True

    def apply(self) -> None:
        """Writes everything staged to the device, without a batch."""
        self._upload(np.empty(0, np.int64), 0, 0)
        self._runner.run(gather=False, query_starts=None, positions=None)

    def gather(
        self, rows: Sequence[int], padded_rows: int | None = None
    ) -> tuple[torch.Tensor, ...]:
        """Applies what is staged; returns each group's table of `rows`, in their order.

        int32 `(padded_rows, max_blocks * ratio)`, views of tensors that never move: the next
        call overwrites them. Rows behind the last one are zeros; entries behind the blocks of a
        row are undefined. Raises `LayoutError` for a row that does not exist or is given twice,
        and for less padding than rows.
        """
        at = self._checked_batch(rows, padded_rows)
        count = len(at) if padded_rows is None else padded_rows
        self._upload(at, count, 0)
        self._runner.run(gather=True, query_starts=None, positions=None)
        return tuple(table[:count] for table in self._state.batch)

    def step(
        self,
        rows: Sequence[int],
        query_starts: torch.Tensor,
        positions: torch.Tensor,
        *,
        padded_rows: int | None = None,
        padded_tokens: int | None = None,
    ) -> tuple[tuple[torch.Tensor, ...], torch.Tensor]:
        """One scheduling step in one launch: staged writes, tables of the batch, and slots.

        Request `i` of the batch has row `rows[i]` and tokens `query_starts[i]` up to
        `query_starts[i + 1]` (int32, on the device), at the `positions` (int64, on the device).
        Returns what `gather` does, and int64 `(groups, padded_tokens)`: `block * kernel block
        size + offset` of each token in the group's kernel blocks, or `PAD_SLOT`. Raises
        `LayoutError` as `gather` does, and for tensors of another type or device.
        """
        self._check_inputs(query_starts, positions)
        if len(query_starts) <= len(rows):
            raise LayoutError(
                f"{len(rows)} requests need {len(rows) + 1} query_starts, not {len(query_starts)}"
            )
        count, tokens = self.stage_step(rows, padded_rows, padded_tokens or len(positions))
        self._runner.run(gather=True, query_starts=query_starts, positions=positions)
        return tuple(table[:count] for table in self._state.batch), self._state.slots[:, :tokens]

    def stage_step(
        self, rows: Sequence[int], padded_rows: int | None, padded_tokens: int
    ) -> tuple[int, int]:
        """The host's half of `step`: checks, and one copy to the device.

        Returns rows and tokens with padding. A graph that captured `run_step` is replayed after
        this call.
        """
        at = self._checked_batch(rows, padded_rows)
        if not 0 <= padded_tokens <= self._state.slots.shape[1]:
            raise LayoutError(
                f"{padded_tokens} tokens in a batch: there is room for {self._state.slots.shape[1]}"
            )
        count = len(at) if padded_rows is None else padded_rows
        self._upload(at, count, padded_tokens)
        return count, padded_tokens

    def run_step(self, query_starts: torch.Tensor, positions: torch.Tensor) -> None:
        """The device's half of `step`: one launch; allocates nothing and waits for nothing.

        `query_starts` has an entry more than the batch has requests, or more than that.
        """
        self._check_inputs(query_starts, positions)
        self._runner.run(gather=True, query_starts=query_starts, positions=positions)

    def _check_inputs(self, query_starts: torch.Tensor, positions: torch.Tensor) -> None:
        for name, tensor, dtype in (
            ("query_starts", query_starts, torch.int32),
            ("positions", positions, torch.int64),
        ):
            if tensor.dtype != dtype or tensor.device != self.device:
                raise LayoutError(
                    f"{name} is {tensor.dtype} on {tensor.device}, but must be {dtype} on "
                    f"{self.device}"
                )

    def _upload(self, batch: NDArray[np.int64], padded_rows: int, padded_tokens: int) -> None:
        """Brings staged blocks and the batch to the device; more than fits goes ahead."""
        changed = np.flatnonzero(self._changed)
        staged = (self._lengths - np.minimum(self._staged_from, self._lengths)).sum(axis=0)
        if int(staged[changed].sum()) > self._capacity:
            room = 0
            some: list[int] = []
            for row in changed.tolist():
                if room + int(staged[row]) > self._capacity:
                    self._send(np.array(some), 0, 0, 0)
                    self._runner.run(gather=False, query_starts=None, positions=None)
                    room, some = 0, []
                room += int(staged[row])
                some.append(row)
            changed = np.array(some)
        others = changed[~np.isin(changed, batch)]
        self._send(np.concatenate([batch, others]), len(batch), padded_rows, padded_tokens)

    def _send(
        self, rows: NDArray[np.int64], num_batch: int, padded_rows: int, padded_tokens: int
    ) -> None:
        groups, max_requests = self._lengths.shape
        lengths = self._lengths[:, rows].astype(np.int64)
        starts = np.minimum(self._staged_from[:, rows], lengths)
        counts = lengths - starts
        firsts = self._firsts[:, None] + rows * self._widths[:, None] + starts
        ids = self._ids[ragged_index(firsts.reshape(-1), counts.reshape(-1))]
        offsets = np.cumsum(counts.reshape(-1)).reshape(counts.shape) - counts
        fixed = fixed_entries(groups, max_requests)
        array = np.zeros(fixed + len(ids), np.int32)
        array[:HEADER] = len(rows), num_batch, padded_rows, padded_tokens
        array[HEADER : HEADER + len(rows)] = rows
        columns = array[HEADER + max_requests : fixed].reshape(4, groups, max_requests)
        columns[:, :, : len(rows)] = starts, counts, offsets, lengths
        array[fixed:] = ids
        self._runner.upload(StepWork(array, groups, max_requests))
        self._staged_from[:, rows] = _CLEAN
        self._changed[rows] = False

    def _check_rows(self, rows: NDArray[np.int64]) -> None:
        if len(rows) and not (rows.min() >= 0 and rows.max() < self.max_requests):
            row = rows[(rows < 0) | (rows >= self.max_requests)][0]
            raise LayoutError(f"row {row} does not exist: there are {self.max_requests} rows")

    def _checked_batch(self, rows: Sequence[int], padded_rows: int | None) -> NDArray[np.int64]:
        at = np.asarray(rows, np.int64).reshape(-1)
        self._check_rows(at)
        _refuse_repeated_rows(at)
        if padded_rows is not None and not len(at) <= padded_rows <= self.max_requests:
            raise LayoutError(
                f"{len(at)} requests padded to {padded_rows} rows: there are {self.max_requests}"
            )
        return at

    def _check_appended(
        self, rows: NDArray[np.int64], more: NDArray[np.int64], ids: NDArray[np.int64]
    ) -> None:
        expected = (len(self.groups), len(rows))
        if more.shape != expected or (more.size and more.min() < 0) or more.sum() != len(ids):
            raise LayoutError(
                f"counts of shape {more.shape} that sum up to {more.sum()} for {len(ids)} block "
                f"ids: they must have the shape {expected}, and the sum of the ids"
            )
        _refuse_repeated_rows(rows)
        before = self._lengths[:, rows]
        over = np.argwhere(before + more > self._widths[:, None])
        if len(over):
            group, index = over[0]
            raise LayoutError(
                f"request in row {rows[index]}, group {group}: it has {before[group, index]} "
                f"blocks and can not take {more[group, index]} more: a row holds "
                f"{self._widths[group]}"
            )
        top = _MAX_ENTRY // max(group.ratio for group in self.groups)
        if len(ids) and ids.max() > top:
            raise LayoutError(f"block id {ids.max()} is too large: tables hold ids up to {top}")
        if len(ids) and ids.min() < 0:
            where = np.repeat(np.arange(more.size), more.reshape(-1))[int(ids.argmin())]
            group, index = divmod(int(where), len(rows))
            raise LayoutError(
                f"request in row {rows[index]}, group {group}: block id {ids.min()} is negative"
            )


def _refuse_repeated_rows(rows: NDArray[np.int64]) -> None:
    counts = np.bincount(rows) if len(rows) else rows
    if len(counts) and counts.max() > 1:
        raise LayoutError(f"row {int(counts.argmax())} is given twice")


def _check_sizes(
    groups: Sequence[TableGroup], max_requests: int, max_tokens: int, parallel: ContextParallel
) -> None:
    sizes = [("groups", len(groups)), ("max_requests", max_requests), ("max_tokens", max_tokens)]
    for index, group in enumerate(groups):
        sizes += [
            (f"group {index}: block_size", group.block_size),
            (f"group {index}: max_blocks", group.max_blocks),
            (f"group {index}: kernel_block_size", group.kernel_size),
        ]
    for name, value in sizes:
        if value < 1:
            raise LayoutError(f"block tables with {name} = {value} are not possible")
    for index, group in enumerate(groups):
        if group.block_size % group.kernel_size:
            raise LayoutError(
                f"group {index}: kernel blocks of {group.kernel_size} tokens do not divide blocks "
                f"of {group.block_size}"
            )
        if group.context_parallel and parallel.size > 1 and group.block_size % parallel.interleave:
            raise LayoutError(
                f"group {index}: an interleave of {parallel.interleave} tokens does not divide "
                f"blocks of {group.block_size}"
            )


def _make_state(
    groups: tuple[TableGroup, ...],
    max_requests: int,
    max_tokens: int,
    device: torch.device | str,
    parallel: ContextParallel,
) -> TableState:
    def tables() -> tuple[torch.Tensor, ...]:
        made = []
        for group in groups:
            width = group.max_blocks * group.ratio
            stride = -(-width // _ROW_ALIGNMENT) * _ROW_ALIGNMENT
            table = torch.zeros((max_requests, stride), dtype=torch.int32, device=device)
            made.append(table[:, :width])
        return tuple(made)

    slots = torch.full((len(groups), max_tokens), PAD_SLOT, dtype=torch.int64, device=device)
    return TableState(groups, parallel, max_requests, tables(), tables(), slots)


def _open_runner(state: TableState, capacity: int) -> StepRunner:
    # Imported here: Triton is slow to import, and there is none on some machines.
    if state.slots.device.type == "cpu":
        from kvtier.torch.block_table_host import HostRunner

        return HostRunner(state)
    from kvtier.torch.block_table_kernel import KernelRunner

    return KernelRunner(state, capacity)
