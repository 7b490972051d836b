"""A step of the block tables as one launch of a Triton kernel.

Program `(g, i)` does all of a step's work for group `g` and request `i`: it writes the request's
staged blocks into its row, copies the row to the batch's table and maps the request's tokens. No
program needs what another one writes. The grid does not depend on the batch, what it does is read
from device memory, and nothing is allocated: a captured graph can be replayed for other batches.
"""

from __future__ import annotations

import numpy as np
import torch
import triton
import triton.language as tl

from kvtier.torch.block_table import PAD_SLOT, TableState
from kvtier.torch.block_table_work import HEADER, StepWork, fixed_entries

__all__ = ["KernelRunner", "step_tables"]

_WIDTH = 1024
_UPLOADS = 2
_META = 8


class KernelRunner:
    """See `StepRunner`."""

    def __init__(self, state: TableState, capacity: int) -> None:
        """Room for `capacity` staged blocks in one step."""
        self._state = state
        device = state.slots.device
        size = fixed_entries(len(state.groups), state.max_requests) + capacity
        self._work = torch.zeros(size, dtype=torch.int32, device=device)
        self._uploads = [_Upload(size, device) for _ in range(_UPLOADS)]
        self._turn = 0
        self._meta = torch.tensor(
            [
                [
                    table.data_ptr(),
                    batch.data_ptr(),
                    table.stride(0),
                    group.ratio,
                    group.block_size,
                    group.kernel_size,
                    group.maps_slots,
                    group.context_parallel,
                ]
                for group, table, batch in zip(state.groups, state.tables, state.batch, strict=True)
            ],
            dtype=torch.int64,
            device=device,
        )

    def upload(self, work: StepWork) -> None:
        """One copy from pinned memory, behind what the current stream still does with the last."""
        self._turn = (self._turn + 1) % _UPLOADS
        self._uploads[self._turn].send(work.array, self._work)

    def run(
        self,
        *,
        gather: bool,
        query_starts: torch.Tensor | None,
        positions: torch.Tensor | None,
    ) -> None:
        """One launch."""
        state, parallel = self._state, self._state.context_parallel
        maps = query_starts is not None and positions is not None
        step_tables[(len(state.groups), state.max_requests + 1)](
            self._work,
            self._meta,
            state.slots,
            state.slots.stride(0),
            query_starts if maps else self._work,
            positions if maps else self._meta,
            parallel.rank,
            MAX_REQUESTS=state.max_requests,
            GROUPS=len(state.groups),
            GATHER=gather,
            MAPS=maps,
            RANKS=parallel.size,
            INTERLEAVE=parallel.interleave,
            PAD=PAD_SLOT,
            HEADER=HEADER,
            META=_META,
            WIDTH=_WIDTH,
        )


class _Upload:
    """Pinned memory for one copy to the device; used again when that copy is over."""

    def __init__(self, size: int, device: torch.device) -> None:
        self._pinned = device.type == "cuda"
        self._buffer = torch.zeros(size, dtype=torch.int32, pin_memory=self._pinned)
        self._host = self._buffer.numpy()
        self._copied: torch.cuda.Event | None = None

    def send(self, array: np.ndarray[tuple[int], np.dtype[np.int32]], to: torch.Tensor) -> None:
        if self._copied is not None:
            self._copied.synchronize()  # of two steps ago: over, unless the device is far behind
        self._host[: len(array)] = array
        to[: len(array)].copy_(self._buffer[: len(array)], non_blocking=True)
        if self._pinned:
            self._copied = self._copied or torch.cuda.Event()
            self._copied.record()


@triton.jit  # type: ignore[untyped-decorator]
def step_tables(  # type: ignore[no-untyped-def]
    work,
    meta,
    slots,
    slots_stride,
    query_starts,
    positions,
    rank,
    MAX_REQUESTS: tl.constexpr,
    GROUPS: tl.constexpr,
    GATHER: tl.constexpr,
    MAPS: tl.constexpr,
    RANKS: tl.constexpr,
    INTERLEAVE: tl.constexpr,
    PAD: tl.constexpr,
    HEADER: tl.constexpr,
    META: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Does the work of `kvtier.torch.block_table_work`, for the groups that `meta` describes.

    `meta` is int64 `(groups, META)`: addresses of table and batch table, entries a row, kernel
    blocks a block, tokens of a block and of a kernel block, whether tokens have slots, whether
    context parallelism deals them out.
    """
    group = tl.program_id(0)
    request = tl.program_id(1)
    about = meta + group * META
    table = tl.load(about).to(tl.pointer_type(tl.int32), bitcast=True)
    batch = tl.load(about + 1).to(tl.pointer_type(tl.int32), bitcast=True)
    stride = tl.load(about + 2)
    ratio = tl.load(about + 3)
    num_requests = tl.load(work)
    num_batch = tl.load(work + 1)
    lane = tl.arange(0, WIDTH)

    if request < num_requests:
        row = tl.load(work + HEADER + request).to(tl.int64)
        # A row starts at a multiple of 32 entries, which the compiler can not see.
        source = tl.multiple_of(table + row * stride, 128)
        column = work + HEADER + MAX_REQUESTS + group * MAX_REQUESTS + request
        size: tl.constexpr = GROUPS * MAX_REQUESTS
        first = tl.load(column) * ratio
        staged = tl.load(column + size) * ratio
        ids = work + HEADER + MAX_REQUESTS + 4 * size + tl.load(column + 2 * size)
        length = tl.load(column + 3 * size)
        at = staged * 0
        while at < staged:
            entry = at + lane
            block = tl.load(ids + entry // ratio, mask=entry < staged, other=0)
            tl.store(source + first + entry, block * ratio + entry % ratio, mask=entry < staged)
            at += WIDTH
        # What this program wrote is read below by other threads of it.
        tl.debug_barrier()
        if request < num_batch:
            if GATHER:
                target = tl.multiple_of(batch + request.to(tl.int64) * stride, 128)
                # Rounded up, within the row, so that words of four entries are whole.
                entries = tl.multiple_of((length * ratio + 3) // 4 * 4, 4)
                at = entries * 0
                while at < entries:
                    entry = tl.multiple_of(at, WIDTH) + lane
                    block = tl.load(source + entry, mask=entry < entries)
                    tl.store(target + entry, block, mask=entry < entries)
                    at += WIDTH
            if MAPS:
                block_size = tl.load(about + 4)
                kernel_size = tl.load(about + 5)
                maps = tl.load(about + 6)
                dealt = tl.load(about + 7)
                token = tl.load(query_starts + request)
                # What the batch says must not lead behind the end of the slots.
                end = tl.minimum(tl.load(query_starts + request + 1), slots_stride)
                while token < end:
                    place = token + lane
                    local = tl.load(positions + place, mask=place < end, other=0)
                    here = local >= 0
                    if RANKS > 1:
                        tokens = block_size * RANKS
                        offset = local % tokens
                        mine = offset // INTERLEAVE % RANKS == rank
                        dealt_local = (
                            local // tokens * block_size
                            + offset // (INTERLEAVE * RANKS) * INTERLEAVE
                            + offset % INTERLEAVE
                        )
                        here = here & (mine | (dealt == 0))
                        local = tl.where(dealt != 0, dealt_local, local)
                    here = here & (local < length * block_size) & (maps != 0)
                    known = here & (place < end)
                    block = tl.load(source + local // kernel_size, mask=known, other=0)
                    slot = block.to(tl.int64) * kernel_size + local % kernel_size
                    slot = tl.where(here, slot, PAD)
                    tl.store(slots + group * slots_stride + place, slot, mask=place < end)
                    token += WIDTH
    if GATHER:  # noqa: SIM102 - decided when it is compiled, the next line when it runs
        if (request >= num_batch) & (request < tl.load(work + 2)):
            target = batch + request.to(tl.int64) * stride
            at = stride * 0
            while at < stride:
                entry = at + lane
                tl.store(target + entry, 0, mask=entry < stride)
                at += WIDTH
    if MAPS:  # noqa: SIM102 - as above
        if request == MAX_REQUESTS:
            token = tl.load(query_starts + num_batch)
            end = tl.load(work + 3)
            while token < end:
                place = token + lane
                tl.store(slots + group * slots_stride + place, PAD, mask=place < end)
                token += WIDTH
