"""Runs of a flat shard: fill them, scale them, take them from another.

Run i is elements [starts[i], stops[i]). All three are elementwise in the shard, so what they return on a
shard is the shard of what they return on the whole.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .registry import OnShard, Traits, define


def fill_runs(like: Tensor, starts: Sequence[int], stops: Sequence[int], values: Sequence[float]) -> Tensor:
    """[size] as `like`: `values[i]` on run i, zero elsewhere."""
    out = torch.zeros_like(like, memory_format=torch.contiguous_format)
    for a, b, value in zip(starts, stops, values, strict=True):
        out.view(-1)[a:b] = value
    return out


def scale_runs(
    x: Tensor, starts: Sequence[int], stops: Sequence[int], columns: Sequence[int], factors: Tensor
) -> Tensor:
    """`x` with run i multiplied by `factors[columns[i]]`; the rest as it is."""
    out = x.clone(memory_format=torch.contiguous_format)
    flat, factors = out.view(-1), factors.to(x.dtype)
    for a, b, column in zip(starts, stops, columns, strict=True):
        flat[a:b] *= factors[column]
    return out


def take_runs(base: Tensor, other: Tensor, starts: Sequence[int], stops: Sequence[int]) -> Tensor:
    """The runs of `other`, the rest of `base`; in `other`'s dtype."""
    out = torch.empty_like(other, memory_format=torch.contiguous_format).copy_(base)
    for a, b in zip(starts, stops, strict=True):
        out.view(-1)[a:b] = other.view(-1)[a:b]
    return out


define(
    "fill_runs(Tensor like, int[] starts, int[] stops, float[] values) -> Tensor",
    fill_runs,
    lambda like, *rest: like.new_empty(like.shape),
    traits=Traits(OnShard.SHAPE, constant_fill=True),
)
define(
    "scale_runs(Tensor x, int[] starts, int[] stops, int[] columns, Tensor factors) -> Tensor",
    scale_runs,
    lambda x, *rest: x.new_empty(x.shape),
    traits=Traits(OnShard.KEEPS),
)
define(
    "take_runs(Tensor base, Tensor other, int[] starts, int[] stops) -> Tensor",
    take_runs,
    lambda base, other, *rest: other.new_empty(other.shape),
    traits=Traits(OnShard.KEEPS),
)
