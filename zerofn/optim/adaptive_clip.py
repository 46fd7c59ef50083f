"""Clip the gradient of each row of a weight by the norm of the row."""

from __future__ import annotations

import functools
from typing import Any

import torch

from ..sharded_math.axis_reductions import Kept, LeafSums, axis_scale, axis_squares, groups_of, logical_leaves
from ..util.arguments import known_arguments
from . import checks
from .base import About, EmptyState, GradientTransformation, no_state


@known_arguments
def adaptive_grad_clip(
    clipping: float, eps: float = 1e-3, axis: int | tuple[int, ...] | None = None
) -> GradientTransformation:
    """Clip the gradient of each row to `clipping` times the norm of the row's weights (Brock et al. 2021, equation 3).

    A row is a slice along dim 0, which is the dim of outputs in torch's weights (optax has outputs last). A leaf
    with at most one dim longer than 1 counts as one row. A norm of weights below `eps` counts as `eps`. `axis`: the
    dims to take norms over, instead of all but dim 0.

    Norms are of complete rows, over all ranks. Shards are not gathered: each rank sends two numbers for every row,
    in one all-gather. Raises `ValueError` unless `clipping` is positive and `eps` is not negative, for an `axis`
    that a leaf does not have, and in `update` without the parameters.

    >>> tx = adaptive_grad_clip(0.1)
    >>> params, grads = {"w": torch.ones(2)}, {"w": torch.tensor([3.0, 4.0])}
    >>> tx.update(grads, tx.init(params), params)[0]
    {'w': tensor([0.0849, 0.1131])}
    """
    checks.number("adaptive_grad_clip", 0.0, above=True, clipping=clipping)
    checks.number("adaptive_grad_clip", 0.0, eps=eps)
    axes = None if axis is None else tuple(axis) if isinstance(axis, tuple | list) else (axis,)

    def update(updates: Any, state: EmptyState, params: Any = None) -> tuple[Any, EmptyState]:
        checks.needs_params("adaptive_grad_clip", params)
        leaves = [(x.name, x.shape) for x in logical_leaves(updates)]
        norms = axis_squares((params, updates), _groups((*leaves, *leaves), axes)).sqrt()
        weights, found = norms[: len(norms) // 2], norms[len(norms) // 2 :]
        most = clipping * weights.clamp(min=eps)
        # 1e-6 is optax's guard against a division by zero.
        factors = torch.where(found < most, 1.0, most / found.clamp(min=1e-6))
        return axis_scale(updates, _groups(tuple(leaves), axes), factors), state

    return GradientTransformation(no_state, update, About("adaptive_grad_clip", (clipping, eps, axes)))


@functools.lru_cache(maxsize=64)
def _groups(leaves: tuple[tuple[str, tuple[int, ...]], ...], axes: tuple[int, ...] | None) -> list[LeafSums]:
    return groups_of([shape for _, shape in leaves], [[_kept(name, shape, axes)] for name, shape in leaves])


def _kept(name: str, shape: tuple[int, ...], axes: tuple[int, ...] | None) -> Kept:
    """Return, for each dim of a leaf, whether norms keep it; they are taken over the others."""
    ndim = len(shape)
    if axes is None:
        one = sum(n != 1 for n in shape) <= 1
        return tuple(d == 0 and not one for d in range(ndim))
    if any(not -ndim <= d < ndim for d in axes):
        raise ValueError(
            f"adaptive_grad_clip: axis={axes} has a dim that leaf {name!r} of shape {list(shape)} does not have. Leave "
            "axis out, or select the leaves that have these dims: optim.masked(adaptive_grad_clip(...), mask)."
        )
    over = {d % ndim for d in axes}
    return tuple(d not in over for d in range(ndim))
