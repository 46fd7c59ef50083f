"""`chain`: apply transformations one after the other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor

from . import checks
from . import moment_formats as formats
from .base import GradientTransformation, scaled, step, unless_skipped
from .identity import identity


def chain(*transformations: GradientTransformation) -> GradientTransformation:
    """Apply `transformations` one after the other (optax.chain).

    The state is the tuple of their states. If the last one updates the parameters itself, as `adamw` does, it runs
    fused: one pass over memory, which also multiplies by the scalars of those before it, such as that of
    `clip_by_global_norm`. Raises `TypeError` for an argument that is no transformation, and `ValueError` for moments
    in another format anywhere but in the last: only a fused update rounds them stochastically.

    >>> from zerofn import optim
    >>> optim.chain(optim.clip_by_global_norm(1.0), optim.lamb(1e-3))
    chain(clip_by_global_norm(1.0), lamb(0.001, 0.9, 0.999, 1e-06, 0.0, 0.0, None))
    """
    for t in transformations:
        checks.transformation("chain", t)
    for t in transformations[:-1]:
        if formats.in_format(t):
            raise ValueError(
                f"chain: {t!r} must be the last, because only then are its moments rounded stochastically; "
                "put the others before it, or write moments=None."
            )

    def init(params: Any) -> tuple[Any, ...]:
        return tuple(t.init(params) for t in transformations)

    def update(grads: Any, state: Any, params: Any = None) -> tuple[Any, tuple[Any, ...]]:
        fresh = []
        for t, s in zip(transformations, state, strict=True):
            grads, s = t.update(grads, s, params)
            fresh.append(s)
        return grads, tuple(fresh)

    def apply(grads: Any, state: Any, params: Any, factor: Tensor | None, finite: Tensor | None) -> tuple[Any, Any]:
        fresh = []
        for t, s in zip(changing, state, strict=False):
            grads, new = t.update(scaled(grads, factor), s, params)
            factor = None
            fresh.append(unless_skipped(finite, new, s))
        params, new = step(last, grads, state[-1], params, _fold(scaling, grads, factor), finite)
        return params, (*fresh, *state[len(fresh) : -1], new)

    lead, last = transformations[:-1], (transformations or [identity()])[-1]
    scaling = lead[max((i + 1 for i, t in enumerate(lead) if t.factor is None), default=0) :]
    changing = lead[: len(lead) - len(scaling)]
    labels = [t.label for t in transformations if t.label]
    rates = [(i, t.learning_rate) for i, t in enumerate(transformations) if t.learning_rate]
    return GradientTransformation(
        init,
        update,
        "chain",
        transformations,
        apply=apply if last.apply is not None else None,
        factor=partial(_fold, transformations) if all(t.factor for t in transformations) else None,
        label=(lambda leaf: tuple(label(leaf) for label in labels)) if labels else None,
        learning_rate=(lambda state: rates[-1][1](state[rates[-1][0]])) if rates else None,
        by_runs=last.apply is not None and last.by_runs and not changing,
    )


def named_chain(name: str, args: tuple[Any, ...], *transformations: GradientTransformation) -> GradientTransformation:
    """Return the chain of `transformations`, with `name` and `args` for its repr and for comparisons."""
    return replace(chain(*transformations), name=name, args=args)


def _fold(transformations: Sequence[GradientTransformation], grads: Any, so_far: Tensor | None) -> Tensor | None:
    """Return the product of the transformations' factors and `so_far`."""
    for t in transformations:
        so_far = t.factor(grads, so_far)  # type: ignore[misc]
    return so_far
