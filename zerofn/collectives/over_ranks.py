"""What is gathered and summed over the ranks of an axis and not differentiated."""

from __future__ import annotations

import torch
from torch import Tensor

from ..comm import transport  # noqa: F401  (defines the operations)
from ..comm.mesh import Axis

ops = torch.ops.zerofn


def rows_over(x: Tensor, axis: Axis) -> Tensor:
    """[...] on each rank -> [size, ...], by rank. Not differentiable: for small, finished values."""
    if axis.size == 1:
        return ops.as_equal(x, axis.name).unsqueeze(0)
    full = ops.wait(ops.all_gather(x.reshape(-1), axis.size, axis.group, ""))
    return full.view(axis.size, *x.shape)


def sum_over(x: Tensor, axis: Axis) -> Tensor:
    """The sum over ranks in rank order, whatever the number of dims. Not differentiable."""
    if axis.size == 1:
        return ops.as_equal(x, axis.name)
    rows = rows_over(x, axis)
    total = rows[0]
    for row in rows[1:]:
        total = total + row
    return total


def sum_in_parts(x: Tensor, axis: Axis) -> Tensor:
    """The sum over ranks in rank order: each sums a part, and all get it. Not differentiable: for large values."""
    if axis.size == 1:
        return ops.as_equal(x, axis.name)
    missing = -x.numel() % axis.size
    flat = torch.nn.functional.pad(x.reshape(-1), (0, missing)) if missing else x.reshape(-1)
    part = ops.wait(ops.reduce_scatter(flat, axis.size, axis.group, ""))
    full = ops.wait(ops.all_gather(part, axis.size, axis.group, ""))
    return (full[: x.numel()] if missing else full).view(x.shape).detach()  # no view: what is behind may write to it
