"""Stochastic gradient descent, with or without momentum."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import tree
from ..ops import sgd as _op  # noqa: F401  (defines zerofn::sgd)
from ..util.arguments import checked
from . import checks
from . import moment_formats as formats
from .base import GradientTransformation, Mask, ScalarOrSchedule, count_zero, rate_at
from .fused import LeafConstants, LeafScale, fused_rule
from .moment_formats import MomentWord
from .torch_optimizers import told


class SgdState(NamedTuple):
    """The state of `sgd`.

    `count`: applied updates, int64 scalar. `trace`: the momentum, in the parameters' structure and, unless
    `moments` says otherwise, dtype; None without momentum.

    >>> sgd(0.5, momentum=0.9).init({"w": torch.zeros(2)}).count
    tensor(0)
    """

    count: Tensor  # type: ignore[assignment]  # tuple.count gives way
    trace: Any


@told
@checked("momentum", "nesterov")
def sgd(
    learning_rate: ScalarOrSchedule,
    momentum: float | None = None,
    nesterov: bool = False,
    weight_decay: float = 0.0,
    mask: Mask | None = None,
    lr_scale: LeafScale | None = None,
    moments: MomentWord | None = None,
) -> GradientTransformation:
    """SGD with momentum (Sutskever et al. 2013), in the arithmetic of `torch.optim.SGD(foreach=False)`.

    d = g + weight_decay * p; m = momentum * m + d; p -= learning_rate * m. With `nesterov`, p -= learning_rate * (d
    + momentum * m); without momentum, p -= learning_rate * d. m starts at zero.

    `mask(leaf) -> bool`: whether a leaf decays; by default all do. `lr_scale(leaf) -> float`: a factor of the
    leaf's learning rate. `moments`: the format of m, as in `adamw`. Raises `ValueError` for hyperparameters out of
    range, and for `nesterov` or `moments` without momentum.

    >>> from zerofn import optim
    >>> tx, params = optim.sgd(0.5), {"w": torch.ones(2)}
    >>> tx.update({"w": torch.ones(2)}, tx.init(params), params)[0]
    {'w': tensor([-0.5000, -0.5000])}
    """
    checks.learning_rate("sgd", learning_rate)
    checks.number("sgd", 0.0, weight_decay=weight_decay, momentum=momentum or 0.0)
    checks.leaf_constants("sgd", mask, lr_scale)
    if nesterov and not momentum:
        raise ValueError(f"sgd: nesterov=True needs momentum, such as momentum=0.9; got momentum={momentum!r}.")

    formats.check("sgd", moments)
    if moments and not momentum:
        raise ValueError(f"sgd: moments={moments!r} has no effect without momentum. Leave it out.")

    constants = LeafConstants(weight_decay, mask, lr_scale)

    def init(params: Any) -> SgdState:
        # Minus zero, because 0 + -0 is 0: the first momentum has the gradient's bits, the signs of its zeros included.
        trace = formats.initial(params, moments, -0.0) if momentum else None
        return formats.state_type(SgdState, moments)(count_zero(params), trace)

    def update(grads: Any, state: SgdState, params: Any) -> tuple[Any, SgdState]:
        rate = rate_at(learning_rate, state.count)
        decays, scales = constants.over(params)
        d = tree.tree_map(lambda g, p, decay: g.to(p.dtype) + decay * p, grads, params, decays)
        trace = state.trace
        if momentum:
            trace = tree.tree_map(lambda m, d: (momentum * m + d).to(m.dtype), trace, d)
            d = tree.tree_map(lambda m, d: d + momentum * m, trace, d) if nesterov else trace
        updates = tree.tree_map(lambda d, scale: (-rate * scale * d).to(d.dtype), d, scales)
        return updates, type(state)(state.count + 1, trace)

    def call(tensors: list[Tensor], runs: tuple[Any, ...], offset: int) -> Any:
        if momentum:
            return torch.ops.zerofn.sgd_momentum(*tensors, *runs, momentum, nesterov, moments, offset)
        return (torch.ops.zerofn.sgd(*tensors, *runs, None, offset),)

    args = (learning_rate, momentum, nesterov, weight_decay, mask, lr_scale, moments)
    fields = ("trace",) if momentum else ()
    return fused_rule("sgd", args, init, update, call, fields, learning_rate, constants)
