"""`chain`: transformations one after the other."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from .base import GradientTransformation


def chain(*transformations: GradientTransformation) -> GradientTransformation:
    """Apply `transformations` in order; the state is the tuple of theirs (optax.chain).

    When all but the last only multiply the gradient by a scalar (clipping by global norm, say), that scalar is
    handed to the last one's `apply`, and the step stays one pass over memory.
    """
    def init(params: Any) -> tuple[Any, ...]:
        return tuple(t.init(params) for t in transformations)

    def update(grads: Any, state: Any, params: Any = None) -> tuple[Any, tuple[Any, ...]]:
        fresh = []
        for t, s in zip(transformations, state, strict=True):
            grads, s = t.update(grads, s, params)
            fresh.append(s)
        return grads, tuple(fresh)

    def apply(grads: Any, state: Any, params: Any, factor: Tensor | None, finite: Tensor | None) -> tuple[Any, Any]:
        for t in transformations[:-1]:
            factor = t.factor(grads, factor)  # type: ignore[misc]
        params, last = transformations[-1].apply(grads, state[-1], params, factor, finite)  # type: ignore[misc]
        return params, (*state[:-1], last)

    fused = bool(transformations) and transformations[-1].apply and all(t.factor for t in transformations[:-1])
    labels = [t.label for t in transformations if t.label]
    rates = [(i, t.learning_rate) for i, t in enumerate(transformations) if t.learning_rate]
    return GradientTransformation(
        init, update, "chain", transformations,
        apply=apply if fused else None,
        label=(lambda leaf: tuple(label(leaf) for label in labels)) if labels else None,
        learning_rate=(lambda state: rates[-1][1](state[rates[-1][0]])) if rates else None,
    )
