"""Clipping by the global norm."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import tree
from ..reductions import global_norm
from .base import EmptyState, GradientTransformation


def clip_by_global_norm(max_norm: float) -> GradientTransformation:
    """Multiply gradients by min(1, max_norm / (norm + 1e-6)), the norm over all leaves and all ranks.

    The arithmetic of `torch.nn.utils.clip_grad_norm_` (Pascanu et al. 2013). Raises `ValueError` unless
    `max_norm` is positive.
    """
    if not max_norm > 0:
        raise ValueError(f"clip_by_global_norm: max_norm must be positive, got {max_norm!r}.")

    def factor(grads: Any, so_far: Tensor | None) -> Tensor:
        norm = global_norm(grads)
        if so_far is not None:
            norm = norm * so_far
        clip = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
        return clip if so_far is None else clip * so_far

    def update(grads: Any, state: EmptyState, params: Any = None) -> tuple[Any, EmptyState]:
        scale = factor(grads, None)
        return tree.tree_map(lambda g: g * scale.to(g.dtype), grads), state

    return GradientTransformation(lambda params: EmptyState(), update, "clip_by_global_norm", (max_norm,),
                                  factor=factor)
