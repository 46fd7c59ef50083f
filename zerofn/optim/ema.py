"""An exponential average of past updates."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import tree
from ..util.arguments import checked
from . import checks
from .base import About, GradientTransformation, count_zero
from .scale_by_adam import averaged, corrected


class EmaState(NamedTuple):
    """The state of `ema`.

    `count`: applied updates, int64 scalar. `ema`: the average without correction, in the parameters' structure and
    dtype.

    >>> tx, grads = ema(0.75), {"w": torch.ones(2)}
    >>> tx.update(grads, tx.init(grads))[1]
    EmaState(count=tensor(1), ema={'w': tensor([0.2500, 0.2500])})
    """

    count: Tensor  # type: ignore[assignment]  # tuple.count gives way
    ema: Any


@checked("debias")
def ema(decay: float, debias: bool = True) -> GradientTransformation:
    """Average past updates u: e = decay * e + (1 - decay) * u, from zero.

    `debias` divides the result by 1 - decay^count (Kingma and Ba 2015, section 3). `trace` sums instead of
    averaging, and `params_ema` averages parameters. Raises `ValueError` unless `decay` is in [0, 1).

    >>> tx, grads = ema(0.5), {"w": torch.tensor([3.0, 4.0])}
    >>> tx.update(grads, tx.init(grads))[0]
    {'w': tensor([3., 4.])}
    """
    checks.number("ema", 0.0, below=1.0, decay=decay)

    def init(params: Any) -> EmaState:
        return EmaState(count_zero(params), tree.tree_map(torch.zeros_like, params))

    def update(updates: Any, state: EmaState, params: Any = None) -> tuple[Any, EmaState]:
        count = state.count + 1
        fresh = averaged(state.ema, updates, decay)
        return corrected(fresh, decay, count) if debias else fresh, EmaState(count, fresh)

    return GradientTransformation(init, update, About("ema", (decay, debias)))
