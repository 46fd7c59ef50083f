"""Adam's moments and direction, and the averages that other transformations share with it."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import tree
from ..util.arguments import checked
from . import checks
from .base import About, GradientTransformation, count_zero
from .moment_formats import initial, state_type


class AdamState(NamedTuple):
    """The state of Adam, AdamW, `scale_by_adam` and `scale_by_radam`.

    `count`: applied updates, int64 scalar. `mu`, `nu`: the averages of gradients and of their squares, in the
    parameters' structure and, unless `moments` says otherwise, dtype.

    >>> scale_by_adam().init({"w": torch.zeros(2)})
    AdamState(count=tensor(0), mu={'w': tensor([0., 0.])}, nu={'w': tensor([0., 0.])})
    """

    count: Tensor  # type: ignore[assignment]  # tuple.count gives way
    mu: Any
    nu: Any


@checked("nesterov")
def scale_by_adam(
    b1: float = 0.9, b2: float = 0.999, eps: float = 1e-8, eps_root: float = 0.0, *, nesterov: bool = False
) -> GradientTransformation:
    """Scale by Adam's direction: m / (sqrt(v + eps_root) + eps) (Kingma and Ba 2015, Algorithm 1).

    m and v average gradients and their squares with decays `b1` and `b2`, from zero, and are bias-corrected. With
    `nesterov`, m is the first moment as if the same gradient came once more (Dozat 2016). Raises `ValueError` for
    hyperparameters out of range.

    >>> tx, grads = scale_by_adam(), {"w": torch.tensor([3.0, 4.0])}
    >>> tx.update(grads, tx.init(grads))[0]
    {'w': tensor([1., 1.])}
    """
    check_moments("scale_by_adam", b1, b2, eps)
    checks.number("scale_by_adam", 0.0, eps_root=eps_root)

    def update(grads: Any, state: AdamState, params: Any = None) -> tuple[Any, AdamState]:
        return direction(grads, state, b1, b2, eps, eps_root, nesterov)

    return GradientTransformation(init_moments, update, About("scale_by_adam", (b1, b2, eps, eps_root, nesterov)))


def init_moments(params: Any, moments: str | None = None) -> AdamState:
    """Return the state before the first update: zero moments, in a format of `optim.moment_formats`."""
    return state_type(AdamState, moments)(count_zero(params), initial(params, moments), initial(params, moments))


def direction(
    grads: Any, state: AdamState, b1: float, b2: float, eps: float, eps_root: float = 0.0, nesterov: bool = False
) -> tuple[Any, AdamState]:
    """Return Adam's direction, in the moments' dtype, and the next state."""
    state = next_moments(grads, state, b1, b2)
    c2 = 1 - b2 ** state.count.double()

    def one(m: Tensor, v: Tensor) -> Tensor:
        return m / ((v / c2.to(v.dtype) + eps_root).sqrt() + eps)

    return tree.tree_map(one, first_moments(grads, state, b1, nesterov), state.nu), state


def next_moments(grads: Any, state: AdamState, b1: float, b2: float) -> AdamState:
    """Return the state after one more gradient."""
    mu = tree.tree_map(lambda m, g: (m + (1 - b1) * (wide(g, m) - m)).to(m.dtype), state.mu, grads)
    return type(state)(state.count + 1, mu, averaged_squares(state.nu, grads, b2))


def first_moments(grads: Any, state: AdamState, b1: float, nesterov: bool) -> Any:
    """Return the bias-corrected first moments of a state whose last gradients are `grads`.

    With `nesterov` they are those after the same gradients once more.
    """
    return look_ahead(grads, state.mu, b1, state.count) if nesterov else corrected(state.mu, b1, state.count)


def look_ahead(grads: Any, moments: Any, decay: float, count: Tensor) -> Any:
    """Return bias-corrected averages as if the same gradients came once more (Dozat 2016)."""
    now, then = 1 - decay ** count.double(), 1 - decay ** (count.double() + 1)

    def one(m: Tensor, g: Tensor) -> Tensor:
        g = wide(g, m).to(m.dtype)
        return decay * (m / then.to(m.dtype)) + (1 - decay) * (g / now.to(m.dtype))

    return tree.tree_map(one, moments, grads)


def averaged(moments: Any, values: Any, decay: float) -> Any:
    """Return decay * m + (1 - decay) * x for moments m and values x, leaf by leaf in the moments' dtypes."""
    return tree.tree_map(lambda m, x: (decay * m + (1 - decay) * wide(x, m)).to(m.dtype), moments, values)


def averaged_squares(moments: Any, values: Any, decay: float) -> Any:
    """Return decay * v + (1 - decay) * x^2 for moments v and values x, leaf by leaf in the moments' dtypes."""
    return tree.tree_map(lambda v, x: (decay * v + (1 - decay) * wide(x, v).square()).to(v.dtype), moments, values)


def corrected(moments: Any, decay: float, count: Tensor | None) -> Any:
    """Return averages that started at zero, divided by 1 - decay^count; unchanged if `count` is None."""
    if count is None:
        return moments
    rest = 1 - decay ** count.double()
    return tree.tree_map(lambda m: m / rest.to(m.dtype), moments)


def wide(g: Tensor, moment: Tensor) -> Tensor:
    """Return a gradient in its moment's dtype, or in float32 if the moment's is narrower."""
    return g.to(torch.promote_types(moment.dtype, torch.float32))


def check_moments(where: str, b1: float, b2: float, eps: float) -> None:
    """Raise `ValueError` unless the decay rates are in [0, 1) and `eps` is not negative."""
    checks.number(where, 0.0, below=1.0, b1=b1, b2=b2)
    checks.number(where, 0.0, eps=eps)
