"""Adam's moments, and the direction they give."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import tree
from . import checks
from .base import GradientTransformation, count_zero
from .moment_formats import initial, state_type


class AdamState(NamedTuple):
    """`count`: applied updates, int64 scalar; `mu`, `nu`: moments, in the parameters' structure and dtype."""

    count: Tensor  # type: ignore[assignment]  # tuple.count gives way
    mu: Any
    nu: Any


def scale_by_adam(
    b1: float = 0.9, b2: float = 0.999, eps: float = 1e-8, eps_root: float = 0.0
) -> GradientTransformation:
    """Gradients -> Adam's direction (Kingma and Ba 2015, Algorithm 1): m / (sqrt(v + eps_root) + eps), both
    moments corrected for their start at zero. Raises `ValueError` for hyperparameters out of range.
    """
    check_moments("scale_by_adam", b1, b2, eps)
    checks.number("scale_by_adam", 0.0, eps_root=eps_root)

    def update(grads: Any, state: AdamState, params: Any = None) -> tuple[Any, AdamState]:
        return direction(grads, state, b1, b2, eps, eps_root)

    return GradientTransformation(init_moments, update, "scale_by_adam", (b1, b2, eps, eps_root))


def init_moments(params: Any, moments: str | None = None) -> AdamState:
    """Zero moments, in a format of `optim.moment_formats`."""
    return state_type(AdamState, moments)(count_zero(params), initial(params, moments), initial(params, moments))


def direction(
    grads: Any, state: AdamState, b1: float, b2: float, eps: float, eps_root: float = 0.0
) -> tuple[Any, AdamState]:
    """-> the direction, in the moments' dtype, and the next state."""
    count = state.count + 1
    mu = tree.tree_map(lambda m, g: (m + (1 - b1) * (_wide(g, m) - m)).to(m.dtype), state.mu, grads)
    nu = tree.tree_map(lambda v, g: (b2 * v + (1 - b2) * _wide(g, v).square()).to(v.dtype), state.nu, grads)
    c1, c2 = 1 - b1 ** count.double(), 1 - b2 ** count.double()

    def one(m: Tensor, v: Tensor) -> Tensor:
        return (m / c1.to(m.dtype)) / ((v / c2.to(v.dtype) + eps_root).sqrt() + eps)

    return tree.tree_map(one, mu, nu), type(state)(count, mu, nu)


def _wide(g: Tensor, moment: Tensor) -> Tensor:
    """A gradient in its moment's dtype, or float32 where that is bfloat16."""
    return g.to(torch.promote_types(moment.dtype, torch.float32))


def check_moments(where: str, b1: float, b2: float, eps: float) -> None:
    """Raise `ValueError` unless the decay rates lie in [0, 1) and `eps` is not negative."""
    checks.number(where, 0.0, below=1.0, b1=b1, b2=b2)
    checks.number(where, 0.0, eps=eps)
