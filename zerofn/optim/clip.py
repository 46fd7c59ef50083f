"""Clip the whole gradient by its norm, or every element."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import tree
from ..sharded_math.reductions import global_norm
from ..sharding.sharded import is_sharded, spec_among
from ..util.arguments import known_arguments
from . import checks
from .base import About, EmptyState, Fused, GradientTransformation, no_state


@known_arguments
def clip_by_global_norm(max_norm: float) -> GradientTransformation:
    """Multiply gradients by min(1, max_norm / (norm + 1e-6)), where norm is over all leaves and all ranks.

    The arithmetic is that of `torch.nn.utils.clip_grad_norm_` (Pascanu et al. 2013). Raises `ValueError` unless
    `max_norm` is positive.

    If the next transformation averages gradients over ranks itself, as `onebit_adam` does after its freeze step, the
    norm is the root mean square of the ranks' gradient norms, which is at least the norm of the mean gradient.

    >>> tx, grads = clip_by_global_norm(1.0), {"w": torch.tensor([3.0, 4.0])}
    >>> tx.update(grads, tx.init(grads))[0]
    {'w': tensor([0.6000, 0.8000])}
    """
    checks.number("clip_by_global_norm", 0.0, above=True, max_norm=max_norm)

    def factor(grads: Any, so_far: Tensor | None) -> Tensor:
        norm = global_norm(grads) * _root_of_ranks(grads)
        if so_far is not None:
            norm = norm * so_far.abs()  # the norm of the gradients times `so_far`
        clip = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
        return clip if so_far is None else clip * so_far

    def update(grads: Any, state: EmptyState, params: Any = None) -> tuple[Any, EmptyState]:
        scale = factor(grads, None)
        return tree.tree_map(lambda g: g * scale.to(g.dtype), grads), state

    return GradientTransformation(
        no_state, update, About("clip_by_global_norm", (max_norm,)), fused=Fused(factor=factor)
    )


def _root_of_ranks(grads: Any) -> float:
    """Return the root of the number of ranks whose gradients are apart, 1 for sums. A rank's is divided by the number
    already, so the norm of all times this is the root of the mean of their squared norms.
    """
    spec = spec_among(tree.leaves(grads, is_leaf=is_sharded))
    return spec.mesh.batch.size**0.5 if spec is not None and spec.of_ranks else 1.0


@known_arguments
def clip(max_delta: float) -> GradientTransformation:
    """Clip every element to [-max_delta, max_delta], as `torch.nn.utils.clip_grad_value_` does.

    Raises `ValueError` unless `max_delta` is positive.

    >>> tx, grads = clip(0.5), {"w": torch.tensor([3.0, 4.0])}
    >>> tx.update(grads, tx.init(grads))[0]
    {'w': tensor([0.5000, 0.5000])}
    """
    checks.number("clip", 0.0, above=True, max_delta=max_delta)

    def update(grads: Any, state: EmptyState, params: Any = None) -> tuple[Any, EmptyState]:
        return tree.tree_map(lambda g: g.clamp(-max_delta, max_delta), grads), state

    return GradientTransformation(no_state, update, About("clip", (max_delta,)))
