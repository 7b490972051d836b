"""The canonical view: every registered KV cache as int8 rows, one row a block.

However an engine arranges its cache, a transfer needs to know which bytes belong to a block. So
each layer's tensors are taken apart into *runs*: bytes of a page that are contiguous in memory,
evenly spaced from block to block. Runs that lie within one stride of each other become one
canonical tensor `(num_blocks, bytes)`; the layers of a packed block are one tensor, and groups
that lie over each other share theirs. All of them are views of the registered storage.

A `PageRef` says which bytes of a row are which bytes of a layer's page. A page is the spec's
parts in memory order, whatever lies between them in memory, so a chunk has the same bytes in a
packed cache, a padded one and one with keys and values apart.

Registering is linear in the number of runs, but for sorting them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch

from kvtier.errors import LayoutError, SharingError
from kvtier.torch.groups import CacheGroup
from kvtier.torch.layouts import Axis, Part

__all__ = ["CanonicalKVCaches", "PageRef", "register_kv_caches"]

Registered: TypeAlias = torch.Tensor | Sequence[torch.Tensor]


@dataclass(frozen=True)
class PageRef:
    """Bytes `page_offset .. + nbytes` of a layer's page are bytes `offset .. + nbytes` of a row."""

    layer: str
    tensor: int
    """Index into `CanonicalKVCaches.tensors`."""
    offset: int
    page_offset: int
    nbytes: int


@dataclass(frozen=True)
class CanonicalKVCaches:
    """What transfers know of a KV cache; made by `register_kv_caches`."""

    num_blocks: int
    groups: tuple[CacheGroup, ...]
    tensors: tuple[torch.Tensor, ...]
    """int8 `(num_blocks, bytes)`, rows contiguous, any row stride."""
    refs: tuple[tuple[PageRef, ...], ...]
    """Of each group, in the order of its layers and of the bytes in their pages."""

    @property
    def device(self) -> torch.device:
        """Where the cache lives."""
        return self.tensors[0].device


@dataclass(frozen=True, eq=False)
class _Run:
    """Contiguous bytes of a layer's page, in every block."""

    group: int
    layer: str
    page_offset: int
    nbytes: int
    address: int
    stride: int
    source: torch.Tensor

    @property
    def end(self) -> int:
        return self.address + self.nbytes


def register_kv_caches(
    groups: Sequence[CacheGroup], num_blocks: int, tensors: Mapping[str, Registered]
) -> CanonicalKVCaches:
    """Takes the tensors that an engine's kernels use, one entry a layer of `groups`.

    A layer with several parts (data and scales, Mamba states) has a sequence of tensors; layers
    that share have the very tensors of their owner. Shapes are those of the spec's view, at the
    size of kernel blocks; strides may differ from it as long as the order of the axes is kept.

    Raises `LayoutError` when layers are missing or unexpected (it lists both), for another
    device, type, shape or order of axes than the spec has, elements that are not contiguous, and
    memory of two layers that overlaps; `SharingError` for a shared layer with other memory than
    its owner. Nothing is kept of a refused call.
    """
    _check_names(groups, tensors)
    given = {name: _as_tuple(value) for name, value in tensors.items()}
    _check_devices(given)
    runs: list[_Run] = []
    for index, group in enumerate(groups):
        for name in group.specs:
            runs += _runs_of_layer(index, name, group, num_blocks, given[name])
        for name, owner in group.sharing.items():
            _check_same_memory(name, given[name], owner, given[owner])
    # In the order of their layers and not of addresses, which differ from run to run.
    order = {run: number for number, run in enumerate(runs)}
    windows = sorted(_windows(runs), key=lambda window: min(order[run] for run in window))
    for window in windows:
        _refuse_overlap_in_group(window)
    _refuse_overlap(windows, num_blocks)

    canonical: list[torch.Tensor] = []
    refs: list[list[PageRef]] = [[] for _ in groups]
    for window in windows:
        start, end = window[0].address, max(run.end for run in window)
        for run in window:
            refs[run.group].append(
                PageRef(run.layer, len(canonical), run.address - start, run.page_offset, run.nbytes)
            )
        canonical.append(_rows(window[0], num_blocks, end - start))
    for index, group in enumerate(groups):
        places = {name: place for place, name in enumerate(group.specs)}
        refs[index].sort(key=lambda ref: (places[ref.layer], ref.page_offset))
    return CanonicalKVCaches(num_blocks, tuple(groups), tuple(canonical), tuple(map(tuple, refs)))


def _check_names(groups: Sequence[CacheGroup], tensors: Mapping[str, Registered]) -> None:
    expected = [name for group in groups for name in group.layers]
    missing = [name for name in expected if name not in tensors]
    unexpected = [name for name in tensors if name not in set(expected)]
    if missing or unexpected:
        raise LayoutError(
            f"the registered tensors are not those of the {len(expected)} layers with a KV "
            f"cache: missing {', '.join(missing) or 'none'}; "
            f"unexpected {', '.join(unexpected) or 'none'}"
        )


def _as_tuple(value: Registered) -> tuple[torch.Tensor, ...]:
    return (value,) if isinstance(value, torch.Tensor) else tuple(value)


def _check_devices(tensors: Mapping[str, tuple[torch.Tensor, ...]]) -> None:
    devices = {str(tensor.device): name for name, parts in tensors.items() for tensor in parts}
    if len(devices) > 1:
        where = ", ".join(f"{name!r} on {device}" for device, name in devices.items())
        raise LayoutError(f"the KV cache lies on more than one device: {where}")


def _check_same_memory(
    name: str,
    parts: Sequence[torch.Tensor],
    owner: str,
    owned: Sequence[torch.Tensor],
) -> None:
    def place(tensors: Sequence[torch.Tensor]) -> list[tuple[object, ...]]:
        return [(t.data_ptr(), t.dtype, tuple(t.shape), t.stride()) for t in tensors]

    if place(parts) != place(owned):
        raise SharingError(
            f"layer {name!r} shares the KV cache of {owner!r}, but was registered with other "
            f"memory: {name} -> {owner}"
        )


def _runs_of_layer(
    index: int, name: str, group: CacheGroup, num_blocks: int, tensors: Sequence[torch.Tensor]
) -> list[_Run]:
    spec = group.kernel_spec(name)
    if len(tensors) != len(spec.parts):
        raise LayoutError(
            f"layer {name!r} has {len(spec.parts)} parts, but {len(tensors)} tensors were "
            f"registered for it"
        )
    ratio = group.blocks_per_kv_block
    runs = []
    ranges = spec.part_ranges()
    for part, (start, _), tensor in zip(spec.parts, ranges, tensors, strict=True):
        for offset, nbytes, address, stride in _part_runs(name, part, tensor, num_blocks * ratio):
            # A block is `ratio` kernel blocks, one page behind the other.
            for kernel in range(ratio):
                runs.append(
                    _Run(
                        group=index,
                        layer=name,
                        page_offset=kernel * spec.page_bytes + start + offset,
                        nbytes=nbytes,
                        address=address + kernel * stride,
                        stride=stride * ratio,
                        source=tensor,
                    )
                )
    return _merged(runs)


def _part_runs(
    name: str, part: Part, tensor: torch.Tensor, num_blocks: int
) -> list[tuple[int, int, int, int]]:
    """`(offset in the part, bytes, address, block stride)` of every run of a part."""
    shape = part.view_shape(num_blocks)
    if tensor.dtype != part.dtype or tuple(tensor.shape) != shape:
        raise LayoutError(
            f"layer {name!r}: registered {tensor.dtype} of shape {tuple(tensor.shape)}, but its "
            f"spec says {part.dtype} of shape {shape}"
        )
    if part.shape is not None:
        # A state is dense in its page, so all of its axes but the block's are one.
        if not tensor[0].is_contiguous():
            raise LayoutError(
                f"layer {name!r}: the state of shape {shape[1:]} with strides "
                f"{tensor.stride()[1:]} is not contiguous"
            )
        strides = {Axis.BLOCK: tensor.stride(0), Axis.HEAD: part.sizes[Axis.DIM], Axis.DIM: 1}
    else:
        strides = dict(zip(part.view, tensor.stride(), strict=True))
    sizes = {**part.sizes, Axis.BLOCK: num_blocks}
    item = part.dtype.itemsize
    _check_strides(name, part, sizes, strides)

    nbytes = item
    outer: list[Axis] = []
    for axis in reversed(part.page_axes):
        if not outer and (sizes[axis] == 1 or strides[axis] * item == nbytes):
            nbytes *= sizes[axis]
        else:
            outer.insert(0, axis)
    runs = []
    for number, steps in enumerate(itertools.product(*(range(sizes[axis]) for axis in outer))):
        away = sum(step * strides[axis] for step, axis in zip(steps, outer, strict=True))
        address = tensor.data_ptr() + away * item
        runs.append((number * nbytes, nbytes, address, strides[Axis.BLOCK] * item))
    return runs


def _check_strides(
    name: str, part: Part, sizes: Mapping[Axis, int], strides: Mapping[Axis, int]
) -> None:
    """Refuses elements that are apart, axes in another order, and elements that overlap."""

    def refuse(why: str) -> LayoutError:
        text = ", ".join(
            f"{axis.name.lower()} {sizes[axis]} x {strides[axis]}" for axis in part.view
        )
        return LayoutError(f"layer {name!r}: {why} (axes as size x stride: {text})")

    last = part.page_axes[-1]
    if sizes[last] > 1 and strides[last] != 1:
        raise refuse("elements of the innermost axis are not contiguous")
    wide = [axis for axis in part.page_axes if sizes[axis] > 1]
    if any(strides[inner] > strides[outer] for outer, inner in itertools.pairwise(wide)):
        order = "".join(axis.value for axis in part.page_axes)
        raise refuse(f"the axes of a page lie in another order than the spec's {order}")
    reach = 1
    for axis in sorted(
        (axis for axis in part.memory if sizes[axis] > 1), key=lambda axis: strides[axis]
    ):
        if strides[axis] < reach:
            raise refuse("elements overlap in memory")
        reach += strides[axis] * (sizes[axis] - 1)


def _merged(runs: list[_Run]) -> list[_Run]:
    """Joins runs of a layer that follow each other both in the page and in memory."""
    runs.sort(key=lambda run: run.page_offset)
    merged: list[_Run] = []
    for run in runs:
        last = merged[-1] if merged else None
        if (
            last is not None
            and last.page_offset + last.nbytes == run.page_offset
            and last.end == run.address
            and last.stride == run.stride
        ):
            merged[-1] = _Run(
                last.group,
                last.layer,
                last.page_offset,
                last.nbytes + run.nbytes,
                last.address,
                last.stride,
                last.source,
            )
        else:
            merged.append(run)
    return merged


def _windows(runs: Sequence[_Run]) -> list[list[_Run]]:
    """Puts runs together whose bytes of one block lie within one block stride of each other."""
    windows: list[list[_Run]] = []
    end = -math.inf
    previous: tuple[int, int] | None = None
    for run in sorted(
        runs, key=lambda run: (run.source.untyped_storage().data_ptr(), run.stride, run.address)
    ):
        place = (run.source.untyped_storage().data_ptr(), run.stride)
        if place == previous and run.end <= end:
            windows[-1].append(run)
        else:
            windows.append([run])
            previous, end = place, run.address + run.stride
    return windows


def _refuse_overlap_in_group(window: Sequence[_Run]) -> None:
    """Groups lie over each other, since a block belongs to one; layers of a group must not."""
    last: dict[int, _Run] = {}
    for run in sorted(window, key=lambda run: run.address):
        before = last.get(run.group)
        if before is not None and run.address < before.end:
            raise LayoutError(
                f"layers {before.layer!r} and {run.layer!r} of group {run.group} lie at the same "
                f"memory; if one of them uses the other's KV cache, declare it as shared"
            )
        last[run.group] = run


def _refuse_overlap(windows: Sequence[Sequence[_Run]], num_blocks: int) -> None:
    for left, right in itertools.pairwise(sorted(windows, key=lambda runs: runs[0].address)):
        end = max(run.end for run in left) + (num_blocks - 1) * left[0].stride
        if right[0].address < end:
            raise LayoutError(
                f"layers {left[0].layer!r} and {right[0].layer!r} overlap in memory with blocks "
                f"of different places: {left[0].stride} and {right[0].stride} bytes from block to "
                f"block, first blocks {right[0].address - left[0].address} bytes apart"
            )


def _rows(run: _Run, num_blocks: int, width: int) -> torch.Tensor:
    storage = run.source.untyped_storage()
    rows = torch.empty(0, dtype=torch.int8, device=run.source.device)
    return rows.set_(
        storage, run.address - storage.data_ptr(), (num_blocks, width), (run.stride, 1)
    )
