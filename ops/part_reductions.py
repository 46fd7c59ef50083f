"""Reductions over parts of flat buffers: one node for a whole tree, one number per part.

`parts` is five lists of equal length: tensor index, start, stop (elements), and the row and column of the
result where the number goes; what no part fills is zero.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from . import cpu, cuda
from .kernel_args import GRADIENTS
from .registry import OnShard, Traits, define

_SIGNATURE = "int[] shard, int[] start, int[] stop, int[] row, int[] column, int num_rows, int num_columns) -> Tensor"


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def dtype_over(tensors: Sequence[Tensor]) -> torch.dtype:
    """The dtype of numbers over `tensors`, whichever of them a rank has parts of: float32 at least."""
    return functools.reduce(torch.promote_types, (x.dtype for x in tensors), torch.float32)


def part_numbers(x: Tensor, start: Sequence[int], stop: Sequence[int]) -> tuple[Tensor, Tensor]:
    """(2-norms, largest magnitudes) [parts] of parts of one tensor, read once. A NaN or inf shows in both."""
    parts = [x[a:b] for a, b in zip(start, stop, strict=True)]
    if not parts:
        return (torch.zeros(0, dtype=_wide(x.dtype), device=x.device),) * 2
    if x.device.type == "cpu" and x.is_contiguous() and x.dtype in GRADIENTS:
        norms, extremes = zip(*cpu.norm2_and_extreme(parts), strict=True)
        return torch.tensor(norms), torch.tensor(extremes)
    if x.is_cuda and x.is_contiguous() and x.dtype in GRADIENTS and not cuda.missing():
        return cuda.norms_and_extremes(x, start, stop)
    return torch.stack(list(map(_norm, parts))), torch.stack([_extreme(p).to(_wide(x.dtype)) for p in parts])


def grid(numbers: Sequence[Tensor], at: Sequence[int], num_rows: int, num_columns: int) -> Tensor:
    """[num_rows, num_columns]: `numbers` in order at positions `at` (row * num_columns + column), zero elsewhere."""
    dtype = dtype_over(numbers)
    out = torch.zeros(num_rows * num_columns, dtype=dtype, device=numbers[0].device)
    out[_places(out.device, tuple(at))] = torch.cat([x.reshape(-1).to(dtype) for x in numbers])
    return out.view(num_rows, num_columns)


@functools.lru_cache(maxsize=256)
def _places(device: torch.device, place: tuple[int, ...]) -> Tensor:
    """Return indices [places], copied to a device once: each copy would block the host."""
    return torch.tensor(place, dtype=torch.int64, device=device)


def _by_row(
    numbers: Sequence[Tensor],
    row: Sequence[int],
    column: Sequence[int],
    num_rows: int,
    num_columns: int,
    over: Sequence[Tensor],
) -> Tensor:
    """`grid` of one number a part of the tensors `over`, of which there may be none."""
    dtype = dtype_over(over)
    if not numbers:
        return torch.zeros(num_rows, num_columns, dtype=dtype, device=over[0].device)
    place = [r * num_columns + c for r, c in zip(row, column, strict=True)]
    return grid(numbers, place, num_rows, num_columns).to(dtype)


def _one_of(k: int) -> Callable[..., Tensor]:
    """One of the two numbers of parts of many tensors, as a grid."""

    def run(tensors, shard, start, stop, row, column, num_rows, num_columns):
        numbers = [part_numbers(tensors[i], [a], [b])[k] for i, a, b in zip(shard, start, stop, strict=True)]
        return _by_row(numbers, row, column, num_rows, num_columns, tensors)

    return run


def _norm(x: Tensor) -> Tensor:
    x = x if x.is_floating_point() else x.to(_wide(x.dtype))
    return torch.linalg.vector_norm(x, dtype=_wide(x.dtype))


def _extreme(x: Tensor) -> Tensor:
    if not x.is_floating_point() or not x.numel():
        return torch.zeros((), device=x.device)  # whole numbers are finite
    low, high = torch.aminmax(x)
    return torch.maximum(low.neg(), high).to(_wide(x.dtype))


def _dots(a, b, shard, start, stop, row, column, num_rows, num_columns):
    dtype = dtype_over([*a, *b])
    numbers = [torch.dot(a[i][s:e].to(dtype), b[i][s:e].to(dtype)) for i, s, e in zip(shard, start, stop, strict=True)]
    return _by_row(numbers, row, column, num_rows, num_columns, [*a, *b])


def _fake(tensors, *rest):
    return tensors[0].new_empty(rest[-2:], dtype=dtype_over(tensors))


def _fake_dots(a, b, *rest):
    return _fake([*a, *b], *rest)


define(f"part_norms(Tensor[] tensors, {_SIGNATURE}", _one_of(0), _fake, traits=Traits(OnShard.LEAVES))
define(f"part_extremes(Tensor[] tensors, {_SIGNATURE}", _one_of(1), _fake, traits=Traits(OnShard.LEAVES))
define(
    "part_numbers(Tensor x, int[] start, int[] stop) -> (Tensor, Tensor)",
    part_numbers,
    lambda x, start, stop: (x.new_empty(len(start), dtype=_wide(x.dtype)),) * 2,
    traits=Traits(OnShard.LEAVES),
)
define(
    "grid(Tensor[] numbers, int[] at, int num_rows, int num_columns) -> Tensor",
    grid,
    lambda numbers, at, *size: numbers[0].new_empty(size, dtype=dtype_over(numbers)),
    traits=Traits(OnShard.LEAVES),
)
define(f"part_dots(Tensor[] a, Tensor[] b, {_SIGNATURE}", _dots, _fake_dots, traits=Traits(OnShard.LEAVES))

# What one pass over a tensor gives, in this order: see `part_numbers`.
NORMS_AND_EXTREMES = tuple(getattr(torch.ops.zerofn, name).default for name in ("part_norms", "part_extremes"))
