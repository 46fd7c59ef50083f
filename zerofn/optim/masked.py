"""Apply a transformation to some leaves."""

from __future__ import annotations

from collections.abc import Hashable
from operator import attrgetter
from typing import Any, NamedTuple

from torch import Tensor

from ..util.arguments import known_arguments
from . import checks
from .base import About, Fused, GradientTransformation, LeafInfo, Mask, rate_inside
from .groups import MaskedTransformation, apply_groups, update_groups
from .identity import identity
from .select import select


class MaskedState(NamedTuple):
    """The state of `masked`.

    `inner_state`: the state of the inner transformation, for the selected leaves only.

    >>> import torch
    >>> from zerofn import optim
    >>> tx = masked(optim.trace(0.9), lambda leaf: leaf.name != "bias")
    >>> tx.init({"bias": torch.zeros(2), "w": torch.zeros(2)}).inner_state.trace["w"]
    tensor([0., 0.])
    """

    inner_state: Any


@known_arguments
def masked(inner: GradientTransformation, mask: Mask) -> GradientTransformation:
    """Apply `inner` to the leaves where `mask(leaf)` is true (optax.masked). The other leaves have no state.

    As in optax, gradients of the other leaves pass through unchanged, for the next transformation of a `chain`. So a
    masked optimizer without a `chain` adds them to the parameters. To leave parameters unchanged, use
    `multi_transform({..., "frozen": set_to_zero()}, labels)`; or `TrainState.create(frozen=...)`, which does not
    compute their gradients either. On `Sharded` trees, a unit with at least one selected leaf has state for all its
    leaves. Raises `TypeError` if `inner` is not a transformation or `mask` not a function of one leaf.

    >>> import torch, zerofn
    >>> tx = masked(zerofn.optim.scale(2.0), lambda leaf: leaf.name != "bias")
    >>> grads = {"bias": torch.ones(2), "w": torch.ones(2)}
    >>> tx.update(grads, tx.init(grads))[0]
    {'bias': tensor([1., 1.]), 'w': tensor([2., 2.])}
    """
    checks.transformation("masked", inner)
    checks.leaf_function("masked", "mask", mask)
    groups = (MaskedTransformation(inner, mask), MaskedTransformation(identity(), lambda leaf: not mask(leaf)))
    rest = identity().init(None)

    def init(params: Any) -> MaskedState:
        return MaskedState(inner.init(select(params, mask)))

    def update(grads: Any, state: MaskedState, params: Any = None) -> tuple[Any, MaskedState]:
        updates, (fresh, _) = update_groups(groups, grads, (state.inner_state, rest), params)
        return updates, MaskedState(fresh)

    def apply(
        grads: Any, state: MaskedState, params: Any, factor: Tensor | None, finite: Tensor | None
    ) -> tuple[Any, MaskedState]:
        params, (fresh, _) = apply_groups(groups, grads, (state.inner_state, rest), params, factor, finite)
        return params, MaskedState(fresh)

    def label(leaf: LeafInfo) -> Hashable:
        return bool(mask(leaf)), inner.about.label(leaf) if inner.about.label and mask(leaf) else ()

    about = About("masked", (inner, mask), label, rate_inside(inner, attrgetter("inner_state")))
    masks = (("masked", mask), *inner.masks)
    return GradientTransformation(init, update, about, masks, Fused(apply, by_runs=True))
