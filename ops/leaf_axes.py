"""Parts of leaves that know their dims: sums of squares over some dims, and scaling along the others.

Part i is elements [start[i], stop[i]) of a flat tensor. Its leaf has `ndim[i]` dims, the next of `sizes`, and its first
element has the position `first[i]` in the leaf. `kept` says for each dim whether numbers vary along it. So results do
not depend on how a leaf is cut.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .part_reductions import dtype_over
from .registry import OnShard, Traits, define


class _Block(NamedTuple):
    """The rows of a leaf that a part touches, of which it may lack some elements at both ends."""

    shape: tuple[int, ...]  # rows first
    kept: tuple[bool, ...]
    lead: int  # elements that are not the part's before it
    begin: int  # where its numbers begin among the leaf's
    numbers: int

    @staticmethod
    def of(first: int, numel: int, sizes: Sequence[int], kept: Sequence[bool]) -> _Block:
        inner = math.prod(sizes[1:])
        low, high = first // inner, -(-(first + numel) // inner)
        each = math.prod(n for n, k in zip(sizes[1:], kept[1:], strict=True) if k)
        begin, rows = (low * each, (high - low) * each) if kept[0] else (0, each)
        return _Block((high - low, *sizes[1:]), tuple(kept), first - low * inner, begin, rows)

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


def _blocks(
    start: Sequence[int],
    stop: Sequence[int],
    first: Sequence[int],
    ndim: Sequence[int],
    sizes: Sequence[int],
    kept: Sequence[bool],
) -> Iterator[_Block]:
    at = 0
    for a, b, place, n in zip(start, stop, first, ndim, strict=True):
        yield _Block.of(place, b - a, sizes[at : at + n], kept[at : at + n])
        at += n


def squares_along(
    tensors: Sequence[Tensor],
    shard: Sequence[int],
    start: Sequence[int],
    stop: Sequence[int],
    first: Sequence[int],
    row: Sequence[int],
    column: Sequence[int],
    ndim: Sequence[int],
    sizes: Sequence[int],
    kept: Sequence[bool],
    num_rows: int,
    num_columns: int,
) -> Tensor:
    """[num_rows, num_columns], float32 at least: the sums of squares of part i over the dims that are not kept, added
    to `row[i]` from `column[i]` on, where its leaf's numbers are."""
    dtype = dtype_over(tensors)
    out = torch.zeros(num_rows, num_columns, dtype=dtype, device=tensors[0].device)
    for k, block in enumerate(_blocks(start, stop, first, ndim, sizes, kept)):
        squares = tensors[shard[k]].reshape(-1)[start[k] : stop[k]].to(dtype).square()
        if squares.numel() < block.numel:
            squares = torch.nn.functional.pad(squares, (block.lead, block.numel - block.lead - squares.numel()))
        over = [d for d, keep in enumerate(block.kept) if not keep]
        found = squares.view(block.shape).sum(over) if over else squares
        at = column[k] + block.begin
        out[row[k], at : at + block.numbers] += found.reshape(-1)
    return out


def scale_along(
    x: Tensor,
    start: Sequence[int],
    stop: Sequence[int],
    first: Sequence[int],
    column: Sequence[int],
    ndim: Sequence[int],
    sizes: Sequence[int],
    kept: Sequence[bool],
    factors: Tensor,
) -> Tensor:
    """`x` with part i times the numbers of `factors` from `column[i]` on, which vary along the dims that are kept; the
    rest as it is."""
    out = x.clone(memory_format=torch.contiguous_format)
    flat = out.view(-1)
    for k, block in enumerate(_blocks(start, stop, first, ndim, sizes, kept)):
        at = column[k] + block.begin
        numbers = factors[at : at + block.numbers]
        numbers = numbers.view([n if keep else 1 for n, keep in zip(block.shape, block.kept, strict=True)])
        part = flat[start[k] : stop[k]]
        if part.numel() == block.numel:
            part.view(block.shape).mul_(numbers)
        else:
            part.mul_(numbers.expand(block.shape).reshape(-1)[block.lead : block.lead + part.numel()])
    return out


def _fake_squares(tensors: Sequence[Tensor], *rest: Any) -> Tensor:
    return tensors[0].new_empty(rest[-2:], dtype=dtype_over(tensors))


_PARTS = "int[] ndim, int[] sizes, bool[] kept"
define(
    "squares_along(Tensor[] tensors, int[] shard, int[] start, int[] stop, int[] first, int[] row, int[] column, "
    f"{_PARTS}, int num_rows, int num_columns) -> Tensor",
    squares_along,
    _fake_squares,
    traits=Traits(OnShard.LEAVES),
)
define(
    f"scale_along(Tensor x, int[] start, int[] stop, int[] first, int[] column, {_PARTS}, Tensor factors) -> Tensor",
    scale_along,
    lambda x, *rest: x.new_empty(x.shape),
    traits=Traits(OnShard.KEEPS),
)


def _groups(x: Tensor, start: Sequence[int], length: Sequence[int], count: Sequence[int], step: Sequence[int]) -> Any:
    """Yield views [rows, count, length] of [rows, columns]: `count[i]` runs from column `start[i]` on."""
    for first, size, num, far in zip(start, length, count, step, strict=True):
        yield x.as_strided((x.shape[0], num, size), (x.stride(0), far, 1), x.storage_offset() + first)


def spread_columns(
    x: Tensor,
    start: Sequence[int],
    at: Sequence[int],
    length: Sequence[int],
    count: Sequence[int],
    step: Sequence[int],
    stride: Sequence[int],
    num_columns: int,
) -> Tensor:
    """[rows, own columns] -> [rows, num_columns]: runs of columns from `at[i]` on, every `stride[i]`, go to those from
    `start[i]` on, every `step[i]`; the rest is zeros."""
    out = torch.zeros(x.shape[0], num_columns, dtype=x.dtype, device=x.device)
    own = x.contiguous()
    for there, here in zip(
        _groups(out, start, length, count, step), _groups(own, at, length, count, stride), strict=True
    ):
        there.copy_(here)
    return out


def own_columns(
    x: Tensor,
    start: Sequence[int],
    at: Sequence[int],
    length: Sequence[int],
    count: Sequence[int],
    step: Sequence[int],
    stride: Sequence[int],
    num_columns: int,
) -> Tensor:
    """[columns] -> [num_columns], the own ones: the transpose of `spread_columns`."""
    out = torch.zeros(1, num_columns, dtype=x.dtype, device=x.device)
    whole = x.contiguous().view(1, -1)
    for there, here in zip(
        _groups(whole, start, length, count, step), _groups(out, at, length, count, stride), strict=True
    ):
        here.copy_(there)
    return out[0]


_RUNS = "int[] start, int[] at, int[] length, int[] count, int[] step, int[] stride, int num_columns"
define(
    f"spread_columns(Tensor x, {_RUNS}) -> Tensor",
    spread_columns,
    lambda x, *rest: x.new_empty(x.shape[0], rest[-1]),
    traits=Traits(OnShard.REFUSED),
)
define(
    f"own_columns(Tensor x, {_RUNS}) -> Tensor",
    own_columns,
    lambda x, *rest: x.new_empty(rest[-1]),
    traits=Traits(OnShard.REFUSED),
)


def take_shard(
    leaves: Sequence[Tensor | None], offsets: Sequence[int], start: int, stop: int, dtype: torch.dtype
) -> Tensor:
    """[stop - start] in `dtype`: elements [start, stop) of the flat buffer in which leaf i begins at `offsets[i]`; None
    and what lies between leaves are zeros. One leaf at least must be there, to say on which device."""
    device = next(x.device for x in leaves if x is not None)
    out = torch.zeros(stop - start, dtype=dtype, device=device)
    for leaf, offset in zip(leaves, offsets, strict=True):
        if leaf is not None:
            a, b = max(offset, start), min(offset + leaf.numel(), stop)
            if a < b:
                out[a - start : b - start] = leaf.reshape(-1)[a - offset : b - offset]
    return out


define(
    "take_shard(Tensor?[] leaves, int[] offsets, int start, int stop, ScalarType dtype) -> Tensor",
    take_shard,
    lambda leaves, offsets, start, stop, dtype: next(x for x in leaves if x is not None).new_empty(
        stop - start, dtype=dtype
    ),
    traits=Traits(OnShard.MAKES, cuts=True),
)


def add_part(whole: Tensor, part: Tensor, start: int) -> Tensor:
    """whole [size], part [n] -> whole, with `part` added to its elements [start, start + n)."""
    out = whole.clone()
    out[start : start + part.numel()] += part
    return out


define(
    "add_part(Tensor whole, Tensor part, int start) -> Tensor",
    add_part,
    lambda whole, part, start: whole.new_empty(whole.shape),
    traits=Traits(OnShard.LEAVES),
)
