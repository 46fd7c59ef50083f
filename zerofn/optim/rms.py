"""Divide by a running root mean square, or standard deviation, of past gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import tree
from ..util.arguments import checked
from . import checks
from .base import About, GradientTransformation, count_zero
from .scale_by_adam import averaged, averaged_squares, corrected


class ScaleByRmsState(NamedTuple):
    """The state of `scale_by_rms`.

    `nu`: the average of squared gradients, in the parameters' structure and dtype. `count`: applied updates, int64
    scalar; None without `bias_correction`.

    >>> scale_by_rms().init({"w": torch.zeros(2)})
    ScaleByRmsState(nu={'w': tensor([0., 0.])}, count=None)
    """

    nu: Any
    count: Any = None


class ScaleByRStdDevState(NamedTuple):
    """The state of `scale_by_stddev`.

    `mu`, `nu`: the averages of gradients and of their squares, in the parameters' structure and dtype. `count`:
    applied updates, int64 scalar; None without `bias_correction`.

    >>> scale_by_stddev().init({"w": torch.zeros(2)}).mu
    {'w': tensor([0., 0.])}
    """

    mu: Any
    nu: Any
    count: Any = None


@checked("eps_in_sqrt", "bias_correction")
def scale_by_rms(
    decay: float = 0.9,
    eps: float = 1e-8,
    initial_scale: float = 0.0,
    eps_in_sqrt: bool = True,
    bias_correction: bool = False,
) -> GradientTransformation:
    """Divide by a running root mean square: g / sqrt(v + eps) with v = decay * v + (1 - decay) * g^2 (Hinton 2012).

    v starts at `initial_scale`. Without `eps_in_sqrt` the result is g / (sqrt(v) + eps), as in torch.
    `bias_correction` divides v by 1 - decay^count. Raises `ValueError` for hyperparameters out of range.

    >>> tx, grads = scale_by_rms(), {"w": torch.tensor([3.0, 4.0])}
    >>> tx.update(grads, tx.init(grads))[0]
    {'w': tensor([3.1623, 3.1623])}
    """
    check_average("scale_by_rms", decay, eps, initial_scale)

    def init(params: Any) -> ScaleByRmsState:
        count = count_zero(params) if bias_correction else None
        return ScaleByRmsState(_full(params, initial_scale), count)

    def update(grads: Any, state: ScaleByRmsState, params: Any = None) -> tuple[Any, ScaleByRmsState]:
        count = state.count + 1 if bias_correction else None
        nu = averaged_squares(state.nu, grads, decay)
        updates = tree.tree_map(_divided(eps, eps_in_sqrt), grads, corrected(nu, decay, count))
        return updates, ScaleByRmsState(nu, count)

    args = (decay, eps, initial_scale, eps_in_sqrt, bias_correction)
    return GradientTransformation(init, update, About("scale_by_rms", args))


@checked("eps_in_sqrt", "bias_correction")
def scale_by_stddev(
    decay: float = 0.9,
    eps: float = 1e-8,
    initial_scale: float = 0.0,
    eps_in_sqrt: bool = True,
    bias_correction: bool = False,
) -> GradientTransformation:
    """Divide by a running standard deviation: g / sqrt(v - m^2 + eps), where m averages gradients (Graves 2013).

    v averages squared gradients, as in `scale_by_rms`. A variance that rounding makes negative counts as zero.
    `bias_correction` also corrects m. The other arguments and errors are those of `scale_by_rms`.

    >>> tx, grads = scale_by_stddev(), {"w": torch.tensor([3.0, 4.0])}
    >>> tx.update(grads, tx.init(grads))[0]
    {'w': tensor([3.3333, 3.3333])}
    """
    check_average("scale_by_stddev", decay, eps, initial_scale)

    def init(params: Any) -> ScaleByRStdDevState:
        count = count_zero(params) if bias_correction else None
        return ScaleByRStdDevState(_full(params, 0.0), _full(params, initial_scale), count)

    def update(grads: Any, state: ScaleByRStdDevState, params: Any = None) -> tuple[Any, ScaleByRStdDevState]:
        count = state.count + 1 if bias_correction else None
        mu = averaged(state.mu, grads, decay)
        nu = averaged_squares(state.nu, grads, decay)
        means, squares = corrected(mu, decay, count), corrected(nu, decay, count)
        variances = tree.tree_map(lambda m, v: (v - m.square()).clamp(min=0), means, squares)
        updates = tree.tree_map(_divided(eps, eps_in_sqrt), grads, variances)
        return updates, ScaleByRStdDevState(mu, nu, count)

    args = (decay, eps, initial_scale, eps_in_sqrt, bias_correction)
    return GradientTransformation(init, update, About("scale_by_stddev", args))


def check_average(where: str, decay: float, eps: float, initial_scale: float) -> None:
    """Raise `ValueError` unless `decay` is in [0, 1) and `eps` and `initial_scale` are not negative."""
    checks.number(where, 0.0, below=1.0, decay=decay)
    checks.number(where, 0.0, eps=eps, initial_scale=initial_scale)


def _full(params: Any, value: float) -> Any:
    return tree.tree_map(lambda p: torch.full_like(p, value), params)


def _divided(eps: float, in_sqrt: bool) -> Callable[[Tensor, Tensor], Tensor]:
    """Return the function (g, v) -> g / sqrt(v), in g's dtype."""

    def one(g: Tensor, v: Tensor) -> Tensor:
        return ((v + eps).rsqrt() * g if in_sqrt else g / (v.sqrt() + eps)).to(g.dtype)

    return one
