"""Momentum as a transformation of its own."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from .. import tree
from ..util.arguments import checked
from . import checks
from .base import About, GradientTransformation


class TraceState(NamedTuple):
    """The state of `trace`.

    `trace`: the decaying sum of past gradients, in the parameters' structure and dtype.

    >>> tx, grads = trace(0.5), {"w": torch.tensor([3.0, 4.0])}
    >>> _, state = tx.update(grads, tx.init(grads))
    >>> tx.update(grads, state)[1]  # g + g / 2
    TraceState(trace={'w': tensor([4.5000, 6.0000])})
    """

    trace: Any


@checked("nesterov")
def trace(decay: float, nesterov: bool = False) -> GradientTransformation:
    """Sum past gradients with decay: t = g + decay * t, from zero (Sutskever et al. 2013).

    The update is t; with `nesterov` it is g + decay * t. Raises `ValueError` for a negative `decay`.

    >>> tx, grads = trace(0.9), {"w": torch.tensor([3.0, 4.0])}
    >>> tx.update(grads, tx.init(grads))[0]
    {'w': tensor([3., 4.])}
    """
    checks.number("trace", 0.0, decay=decay)

    def init(params: Any) -> TraceState:
        return TraceState(tree.tree_map(torch.zeros_like, params))

    def update(grads: Any, state: TraceState, params: Any = None) -> tuple[Any, TraceState]:
        fresh = tree.tree_map(lambda t, g: g.to(t.dtype) + decay * t, state.trace, grads)
        return tree.tree_map(lambda t, g: g + decay * t, fresh, grads) if nesterov else fresh, TraceState(fresh)

    return GradientTransformation(init, update, About("trace", (decay, nesterov)))
