"""An exponential average of the parameters, for evaluation."""

from __future__ import annotations

from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import tree
from ..util.arguments import known_arguments
from . import checks
from .base import About, Fused, GradientTransformation, apply_updates, rate_inside, step


class ParamsEmaState(NamedTuple):
    """The state of `params_ema`.

    `inner_state`: the state of the optimizer. `ema`: the average, in the parameters' structure and dtype.

    >>> from zerofn import optim
    >>> params_ema(optim.sgd(1.0), 0.999).init({"w": torch.ones(2)}).ema
    {'w': tensor([1., 1.])}
    """

    inner_state: Any
    ema: Any


@known_arguments
def params_ema(optimizer: GradientTransformation, decay: float) -> GradientTransformation:
    """Run `optimizer`, and average the parameters: e = decay * e + (1 - decay) * p (Polyak and Juditsky 1992).

    The average starts at the parameters and changes after each applied step. The parameters are those of
    `optimizer` alone, bit for bit. The average is `opt_state.ema`, sharded like the parameters. To evaluate, take
    `zerofn.gather(state.opt_state.ema)`, or `state.replace(params=state.opt_state.ema)` if nothing is frozen:
    frozen parameters have no average.

    Do not put `params_ema` into a `chain`: a later transformation would change the updates, and the average would
    not see it. Raises `ValueError` unless `decay` is in [0, 1).

    >>> from zerofn import optim
    >>> params, tx = {"w": torch.zeros(1)}, optim.params_ema(optim.sgd(1.0), 0.75)
    >>> params, state = tx.fused.apply({"w": -torch.ones(1)}, tx.init(params), params, None, None)
    >>> params["w"].item(), state.ema["w"].item()
    (1.0, 0.25)
    """
    checks.transformation("params_ema", optimizer)
    checks.number("params_ema", 0.0, below=1.0, decay=decay)

    def init(params: Any) -> ParamsEmaState:
        return ParamsEmaState(optimizer.init(params), tree.tree_map(torch.clone, params))

    def average(ema: Any, params: Any) -> Any:
        return tree.tree_map(lambda e, p: (decay * e + (1 - decay) * p).to(e.dtype), ema, params)

    def update(grads: Any, state: ParamsEmaState, params: Any) -> tuple[Any, ParamsEmaState]:
        updates, inner = optimizer.update(grads, state.inner_state, params)
        return updates, ParamsEmaState(inner, average(state.ema, apply_updates(params, updates)))

    def apply(
        grads: Any, state: ParamsEmaState, params: Any, factor: Tensor | None, finite: Tensor | None
    ) -> tuple[Any, ParamsEmaState]:
        params, inner = step(optimizer, grads, state.inner_state, params, factor, finite)
        ema = average(state.ema, params)
        if finite is not None:
            ema = tree.tree_map(lambda new, old: torch.where(finite, new, old), ema, state.ema)
        return params, ParamsEmaState(inner, ema)

    rate = rate_inside(optimizer, attrgetter("inner_state"))
    about = About("params_ema", (optimizer, decay), optimizer.about.label, rate)
    return GradientTransformation(init, update, about, optimizer.masks, Fused(apply))
