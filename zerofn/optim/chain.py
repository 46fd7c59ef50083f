"""`chain`: apply transformations one after another."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from operator import itemgetter
from typing import Any

from torch import Tensor

from . import checks
from . import moment_formats as formats
from .base import About, Fused, GradientTransformation, rate_inside, scaled, step, unless_skipped
from .identity import identity


def chain(*transformations: GradientTransformation) -> GradientTransformation:
    """Apply `transformations` one after another (optax.chain).

    The state is the tuple of their states. If the last one updates the parameters itself, as `adamw` does, it runs
    fused. One pass over memory then also applies scalar factors of earlier transformations, such as the factor of
    `clip_by_global_norm`. Raises `TypeError` for an argument that is not a transformation, and `ValueError` if any
    transformation but the last stores its moments in a format other than the parameters' dtype (`moments=`): such
    moments are rounded stochastically, which only a fused update does.

    >>> from zerofn import optim
    >>> optim.chain(optim.clip_by_global_norm(1.0), optim.sgd(1e-3))
    chain(clip_by_global_norm(max_norm=1.0), sgd(learning_rate=0.001, nesterov=False, weight_decay=0.0))
    """
    for t in transformations:
        checks.transformation("chain", t, phases=True)
    checks.alone_in_chain(transformations)
    for t in transformations[:-1]:
        if formats.in_format(t):
            raise ValueError(
                f"chain: {t!r} must come last, because its moments are rounded stochastically only there. Put the "
                "other transformations before it, or write moments=None."
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
    factors = [t.fused.factor if t.fused else None for t in transformations]
    num_changing = max((i + 1 for i, factor in enumerate(factors[:-1]) if factor is None), default=0)
    changing, scaling = lead[:num_changing], factors[num_changing:-1]
    own = last.fused or Fused()
    labels = [t.about.label for t in transformations if t.about.label]
    rates = [rate_inside(t, itemgetter(i)) for i, t in enumerate(transformations) if t.about.learning_rate]
    label = (lambda leaf: tuple(label(leaf) for label in labels)) if labels else None
    about = About("chain", transformations, label, rates[-1] if rates else None, last.about.phase)
    masks = tuple(mask for t in transformations for mask in t.masks)
    factor = None if None in factors else partial(_fold, factors)
    fused = Fused(apply if own.apply else None, factor, own.by_runs and not changing)
    return GradientTransformation(init, update, about, masks, fused if fused != Fused() else None)


def _fold(factors: Sequence[Any], grads: Any, so_far: Tensor | None) -> Tensor | None:
    """Return the product of the factors of several transformations and `so_far`."""
    for factor in factors:
        so_far = factor(grads, so_far)
    return so_far
