"""Weight decay as a transformation of its own."""

from __future__ import annotations

from typing import Any

from .. import tree
from ..util.arguments import known_arguments
from . import checks
from .base import About, EmptyState, GradientTransformation, LeafInfo, Mask, masks_of, no_state
from .leaf_runs import spread


@known_arguments
def add_decayed_weights(weight_decay: float = 0.0, mask: Mask | None = None) -> GradientTransformation:
    """Add weight_decay * p to the update of each leaf.

    `mask(leaf) -> bool`: whether a leaf decays; by default all do. Before `scale_by_adam` in a chain this is L2
    regularization, after it the decoupled weight decay of AdamW (Loshchilov and Hutter 2019). Raises `TypeError` if
    `weight_decay` is not a number or `mask` not a function of one leaf, and `ValueError` in `update` without the
    parameters.

    >>> import torch
    >>> tx = add_decayed_weights(0.1)
    >>> params, grads = {"w": torch.ones(2)}, {"w": torch.tensor([3.0, 4.0])}
    >>> tx.update(grads, tx.init(params), params)[0]
    {'w': tensor([3.1000, 4.1000])}
    """
    checks.number("add_decayed_weights", weight_decay=weight_decay)
    checks.mask("add_decayed_weights", mask)

    def decay_of(leaf: LeafInfo) -> float:
        return float(weight_decay) if mask is None or mask(leaf) else 0.0

    def update(grads: Any, state: EmptyState, params: Any = None) -> tuple[Any, EmptyState]:
        checks.needs_params("add_decayed_weights", params)
        decayed = tree.tree_map(lambda g, p, d: g + (d * p).to(g.dtype), grads, params, spread(params, decay_of))
        return decayed, state

    about = About("add_decayed_weights", (weight_decay, mask), label=None if mask is None else decay_of)
    return GradientTransformation(no_state, update, about, masks_of("add_decayed_weights", mask))
