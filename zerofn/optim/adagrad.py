"""Adagrad: divide by the root of the sum of all squared gradients."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import tree
from ..util.arguments import known_arguments
from . import checks
from .base import About, GradientTransformation, ScalarOrSchedule, named
from .chain import chain
from .scale import scale_by_learning_rate
from .scale_by_adam import wide
from .torch_optimizers import told


class ScaleByRssState(NamedTuple):
    """The state of `scale_by_rss`.

    `sum_of_squares`: the initial value plus all squared gradients, in the parameters' structure and dtype.

    >>> tx, grads = scale_by_rss(initial_accumulator_value=1.0), {"w": torch.tensor([3.0, 4.0])}
    >>> tx.update(grads, tx.init(grads))[1]
    ScaleByRssState(sum_of_squares={'w': tensor([10., 17.])})
    """

    sum_of_squares: Any


@known_arguments
def scale_by_rss(initial_accumulator_value: float = 0.1, eps: float = 1e-7) -> GradientTransformation:
    """Divide by the root of the sum of all squared gradients: g / sqrt(s + eps) with s = s + g^2 (Duchi et al. 2011).

    s starts at `initial_accumulator_value`. Where s is zero, the update is zero. Raises `ValueError` for a negative
    argument.

    >>> tx, grads = scale_by_rss(), {"w": torch.tensor([3.0, 4.0])}
    >>> tx.update(grads, tx.init(grads))[0]
    {'w': tensor([0.9945, 0.9969])}
    """
    checks.number("scale_by_rss", 0.0, initial_accumulator_value=initial_accumulator_value, eps=eps)

    def init(params: Any) -> ScaleByRssState:
        return ScaleByRssState(tree.tree_map(lambda p: torch.full_like(p, initial_accumulator_value), params))

    def one(g: Tensor, s: Tensor) -> Tensor:
        return torch.where(s > 0, (s + eps).rsqrt() * g, 0.0).to(g.dtype)

    def update(grads: Any, state: ScaleByRssState, params: Any = None) -> tuple[Any, ScaleByRssState]:
        total = tree.tree_map(lambda s, g: (s + wide(g, s).square()).to(s.dtype), state.sum_of_squares, grads)
        return tree.tree_map(one, grads, total), ScaleByRssState(total)

    return GradientTransformation(init, update, About("scale_by_rss", (initial_accumulator_value, eps)))


@told
def adagrad(
    learning_rate: ScalarOrSchedule, initial_accumulator_value: float = 0.1, eps: float = 1e-7
) -> GradientTransformation:
    """Adagrad (Duchi et al. 2011): a chain of `scale_by_rss` and `scale_by_learning_rate`.

    Raises `ValueError` for hyperparameters out of range.

    >>> tx = adagrad(0.1)
    >>> params, grads = {"w": torch.ones(2)}, {"w": torch.tensor([3.0, 4.0])}
    >>> tx.update(grads, tx.init(params), params)[0]
    {'w': tensor([-0.0994, -0.0997])}
    """
    checks.learning_rate("adagrad", learning_rate)
    checks.number("adagrad", 0.0, initial_accumulator_value=initial_accumulator_value, eps=eps)
    args = (learning_rate, initial_accumulator_value, eps)
    scaled = scale_by_rss(initial_accumulator_value, eps)
    return named(chain(scaled, scale_by_learning_rate(learning_rate)), "adagrad", *args)
