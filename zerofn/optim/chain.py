"""`chain`: apply transformations one after the other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor

from . import checks
from .base import GradientTransformation, step
from .identity import identity


def chain(*transformations: GradientTransformation) -> GradientTransformation:
    """Apply `transformations` one after the other (optax.chain).

    The state is the tuple of their states. A chain is *fused* if all but the last only multiply the gradient by a
    scalar, as clipping by global norm does: the last one's `apply` takes that scalar, and the step is one pass over
    memory. Raises `TypeError` for an argument that is no transformation.

    >>> from zerofn import optim
    >>> optim.chain(optim.clip_by_global_norm(1.0), optim.lamb(1e-3))
    chain(clip_by_global_norm(1.0), lamb(0.001, 0.9, 0.999, 1e-06, 0.0, 0.0, None))
    """
    for t in transformations:
        checks.transformation("chain", t)

    def init(params: Any) -> tuple[Any, ...]:
        return tuple(t.init(params) for t in transformations)

    def update(grads: Any, state: Any, params: Any = None) -> tuple[Any, tuple[Any, ...]]:
        fresh = []
        for t, s in zip(transformations, state, strict=True):
            grads, s = t.update(grads, s, params)
            fresh.append(s)
        return grads, tuple(fresh)

    def apply(grads: Any, state: Any, params: Any, factor: Tensor | None, finite: Tensor | None) -> tuple[Any, Any]:
        params, fresh = step(last, grads, state[-1], params, _fold(lead, grads, factor), finite)
        return params, (*state[:-1], fresh)

    lead, last = transformations[:-1], (transformations or [identity()])[-1]
    fused = all(t.factor for t in lead) and last.apply is not None
    labels = [t.label for t in transformations if t.label]
    rates = [(i, t.learning_rate) for i, t in enumerate(transformations) if t.learning_rate]
    return GradientTransformation(
        init,
        update,
        "chain",
        transformations,
        apply=apply if fused else None,
        factor=partial(_fold, transformations) if all(t.factor for t in transformations) else None,
        label=(lambda leaf: tuple(label(leaf) for label in labels)) if labels else None,
        learning_rate=(lambda state: rates[-1][1](state[rates[-1][0]])) if rates else None,
        by_runs=fused and last.by_runs,
    )


def named_chain(name: str, args: tuple[Any, ...], *transformations: GradientTransformation) -> GradientTransformation:
    """Return the chain of `transformations`, with `name` and `args` for its repr and for comparisons."""
    return replace(chain(*transformations), name=name, args=args)


def _fold(transformations: Sequence[GradientTransformation], grads: Any, so_far: Tensor | None) -> Tensor | None:
    """Return the product of the transformations' factors and `so_far`."""
    for t in transformations:
        so_far = t.factor(grads, so_far)  # type: ignore[misc]
    return so_far
