"""Weight decay as a transformation of its own."""

from __future__ import annotations

from typing import Any

from .. import tree
from . import checks
from .base import EmptyState, GradientTransformation, LeafInfo, Mask, no_state
from .leaf_runs import spread


def add_decayed_weights(weight_decay: float = 0.0, mask: Mask | None = None) -> GradientTransformation:
    """g + weight_decay * p, on the leaves where `mask(leaf)` is true; on all without one."""
    checks.number("add_decayed_weights", weight_decay=weight_decay)
    checks.mask("add_decayed_weights", mask)

    def decay_of(leaf: LeafInfo) -> float:
        return float(weight_decay) if mask is None or mask(leaf) else 0.0

    def update(grads: Any, state: EmptyState, params: Any = None) -> tuple[Any, EmptyState]:
        checks.needs_params("add_decayed_weights", params)
        decayed = tree.tree_map(lambda g, p, d: g + (d * p).to(g.dtype), grads, params, spread(params, decay_of))
        return decayed, state

    return GradientTransformation(
        no_state, update, "add_decayed_weights", (weight_decay, mask), label=None if mask is None else decay_of
    )
