"""Transformations that change nothing, or set updates to zero."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import tree
from .base import About, EmptyState, Fused, GradientTransformation, no_state


def identity() -> GradientTransformation:
    """Leave gradients unchanged.

    >>> tx, grads = identity(), {"w": torch.tensor([3.0, 4.0])}
    >>> tx.update(grads, tx.init(grads))[0]
    {'w': tensor([3., 4.])}
    """

    def update(grads: Any, state: EmptyState, params: Any = None) -> tuple[Any, EmptyState]:
        return grads, state

    return GradientTransformation(no_state, update, About("identity"), fused=Fused(factor=lambda grads, so_far: so_far))


def set_to_zero() -> GradientTransformation:
    """Set updates to zero, so that parameters stay unchanged, bit for bit.

    >>> tx, grads = set_to_zero(), {"w": torch.tensor([3.0, 4.0])}
    >>> tx.update(grads, tx.init(grads))[0]
    {'w': tensor([0., 0.])}
    """

    def update(grads: Any, state: EmptyState, params: Any = None) -> tuple[Any, EmptyState]:
        return tree.tree_map(torch.zeros_like, grads), state

    def apply(
        grads: Any, state: EmptyState, params: Any, factor: Tensor | None, finite: Tensor | None
    ) -> tuple[Any, EmptyState]:
        return params, state

    return GradientTransformation(no_state, update, About("set_to_zero"), fused=Fused(apply, by_runs=True))
