"""Divide by a root mean square that is stored as averages of rows and columns."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import tree
from ..ops import runs as _runs  # noqa: F401  (defines zerofn::fill_runs)
from ..sharded_math.axis_reductions import (
    Kept,
    LeafSums,
    axis_scale,
    axis_squares,
    groups_of,
    logical_leaves,
    num_columns,
)
from ..util.arguments import checked
from . import checks
from .base import About, GradientTransformation, count_zero
from .scale_by_adam import wide

ops = torch.ops.zerofn


class FactoredState(NamedTuple):
    """The state of `scale_by_factored_rms`.

    `count`: applied updates, int64 scalar. `v`: averages of squared gradients, one tensor [numbers], float32 or
    wider, the same on every rank. A factored leaf has its means over the longest dim, then those over the second
    longest. Any other leaf has an average for each element. One unused element at the end gives `v` a shape that no
    parameter has. With `factored=False`, `v` is a tree in the parameters' structure and dtype.

    >>> state = scale_by_factored_rms().init({"w": torch.zeros(256, 512)})
    >>> state.v.shape  # 512 + 256 averages, and the unused element
    torch.Size([769])
    """

    count: Tensor  # type: ignore[assignment]  # tuple.count gives way
    v: Any


@checked("factored", "min_dim_size_to_factor")
def scale_by_factored_rms(
    factored: bool = True,
    decay_rate: float = 0.8,
    step_offset: int = 0,
    min_dim_size_to_factor: int = 128,
    epsilon: float = 1e-30,
) -> GradientTransformation:
    """Divide by the root of factored second moments: g / sqrt(v) (Shazeer and Stern 2018, Algorithm 4).

    v is the outer product of the averages of g^2 + epsilon over rows and over columns, divided by the average over
    both. Rows and columns are the two longest dims of a leaf. A leaf is factored if both have at least
    `min_dim_size_to_factor` elements. After t updates the averages decay by 1 - max(1, t + 1 -
    step_offset)^-decay_rate.

    A matrix [n, m] stores n + m numbers, and a leaf that is not factored stores as many as it has elements, on
    every rank. With `factored=False`, v is sharded like the parameters. Shards are not gathered: each rank sends
    its part of all sums, in one all-gather. Raises `ValueError` for hyperparameters out of range.

    >>> tx, grads = scale_by_factored_rms(), {"w": torch.tensor([3.0, 4.0])}
    >>> tx.update(grads, tx.init(grads), grads)[0]  # g / sqrt(g^2) in the first step
    {'w': tensor([1., 1.])}
    """
    where = "scale_by_factored_rms"
    checks.number(where, 0.0, decay_rate=decay_rate, epsilon=epsilon)
    checks.number(where, step_offset=step_offset)
    checks.number(where, 1, min_dim_size_to_factor=min_dim_size_to_factor)

    def init(params: Any) -> FactoredState:
        if not factored:
            return FactoredState(count_zero(params), tree.tree_map(torch.zeros_like, params))
        leaves = logical_leaves(params)
        numbers = num_columns(_groups(tuple(leaf.shape for leaf in leaves), min_dim_size_to_factor))
        dtype = functools.reduce(torch.promote_types, (leaf.dtype for leaf in leaves), torch.float32)
        count = count_zero(params)
        return FactoredState(count, torch.zeros(numbers + 1, dtype=dtype, device=count.device))

    def update(grads: Any, state: FactoredState, params: Any = None) -> tuple[Any, FactoredState]:
        decay = 1 - (state.count.double() + (1 - step_offset)).clamp(min=1) ** -decay_rate
        if not factored:
            v = tree.tree_map(
                lambda v, g: (decay * v + (1 - decay) * (wide(g, v).square() + epsilon)).to(v.dtype), state.v, grads
            )
            scaled = tree.tree_map(lambda g, v: (g * v.rsqrt()).to(g.dtype), grads, v)
            return scaled, FactoredState(state.count + 1, v)
        groups = _groups(tuple(leaf.shape for leaf in logical_leaves(grads)), min_dim_size_to_factor)
        means = _means(axis_squares(grads, groups), groups)
        v = state.v[:-1]
        v = (decay * v + (1 - decay) * (means + epsilon)).to(v.dtype)
        scaled = axis_scale(grads, groups, _factors(v, groups))
        return scaled, FactoredState(state.count + 1, torch.nn.functional.pad(v, (0, 1)))

    args = (factored, decay_rate, step_offset, min_dim_size_to_factor, epsilon)
    return GradientTransformation(init, update, About(where, args))


@functools.lru_cache(maxsize=64)
def _groups(shapes: tuple[tuple[int, ...], ...], least: int) -> list[LeafSums]:
    return groups_of(shapes, [_kept(shape, least) for shape in shapes])


def _kept(shape: tuple[int, ...], least: int) -> list[Kept]:
    """Return, for each average of a leaf, which dims it keeps.

    The averages of a factored leaf are over its longest dim and over its second longest. Any other leaf keeps all
    dims.
    """
    order = sorted(range(len(shape)), key=shape.__getitem__)
    if len(shape) < 2 or shape[order[-2]] < least:
        return [(True,) * len(shape)]
    return [tuple(d != off for d in range(len(shape))) for off in (order[-1], order[-2])]


def _means(squares: Tensor, groups: Sequence[LeafSums]) -> Tensor:
    """Divide sums of squares [numbers] by their numbers of terms."""
    ends = [g.column + g.numel for g in groups]
    terms = ops.fill_runs(squares, [g.column for g in groups], ends, [float(g.terms) for g in groups])
    return squares / terms


def _factors(v: Tensor, groups: Sequence[LeafSums]) -> Tensor:
    """Return the numbers [numbers] that gradients are multiplied by.

    Rows are relative to their mean, because the columns contain that mean, too.
    """
    roots = v.rsqrt()
    parts, done = [], 0
    for rows, columns in zip(groups, groups[1:], strict=False):
        if rows.leaf == columns.leaf:
            longest, second = rows.kept.index(False), columns.kept.index(False)
            means = rows.of(v).mean(second - (second > longest), keepdim=True)
            parts += [roots[done : rows.column], (rows.of(roots) * means.sqrt()).reshape(-1)]
            done = rows.column + rows.numel
    return torch.cat([*parts, roots[done:]])
