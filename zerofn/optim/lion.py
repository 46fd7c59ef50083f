"""Lion: update by the sign of an interpolated momentum."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import tree
from ..ops import lion as _op  # noqa: F401  (defines zerofn::lion)
from . import checks
from . import moment_formats as formats
from .base import GradientTransformation, Mask, ScalarOrSchedule, count_zero, rate_at
from .fused import LeafConstants, LeafScale, fused_rule
from .moment_formats import MomentWord
from .torch_optimizers import told


class LionState(NamedTuple):
    """The state of `lion`.

    `count`: applied updates, int64 scalar. `mu`: the momentum, in the parameters' structure and, unless `moments`
    says otherwise, dtype.

    >>> lion(0.1).init({"w": torch.zeros(2)})
    LionState(count=tensor(0), mu={'w': tensor([0., 0.])})
    """

    count: Tensor  # type: ignore[assignment]  # tuple.count gives way
    mu: Any


@told
def lion(
    learning_rate: ScalarOrSchedule,
    b1: float = 0.9,
    b2: float = 0.99,
    weight_decay: float = 1e-3,
    mask: Mask | None = None,
    lr_scale: LeafScale | None = None,
    moments: MomentWord | None = None,
) -> GradientTransformation:
    """Lion (Chen et al. 2023, Algorithm 2), with decoupled weight decay.

    p -= learning_rate * (sign(b1 * m + (1 - b1) * g) + weight_decay * p); m = b2 * m + (1 - b2) * g. m starts at
    zero.

    `mask(leaf) -> bool`: whether a leaf decays; by default all do. `lr_scale(leaf) -> float`: a factor of the
    leaf's learning rate. `moments`: the format of m, as in `adamw`. Raises `ValueError` for hyperparameters out of
    range.

    >>> tx = lion(0.1)
    >>> params, grads = {"w": torch.ones(2)}, {"w": torch.tensor([3.0, 4.0])}
    >>> tx.update(grads, tx.init(params), params)[0]
    {'w': tensor([-0.1001, -0.1001])}
    """
    checks.learning_rate("lion", learning_rate)
    checks.number("lion", 0.0, below=1.0, b1=b1, b2=b2)
    checks.number("lion", 0.0, weight_decay=weight_decay)
    checks.leaf_constants("lion", mask, lr_scale)
    formats.check("lion", moments)

    constants = LeafConstants(weight_decay, mask, lr_scale)

    def init(params: Any) -> LionState:
        return formats.state_type(LionState, moments)(count_zero(params), formats.initial(params, moments))

    def update(grads: Any, state: LionState, params: Any) -> tuple[Any, LionState]:
        rate = rate_at(learning_rate, state.count)

        def move(m: Tensor, g: Tensor, p: Tensor, decay: Any, scale: Any) -> Tensor:
            return (-rate * scale * ((b1 * m + (1 - b1) * g).sign() + decay * p)).to(p.dtype)

        updates = tree.tree_map(move, state.mu, grads, params, *constants.over(params))
        mu = tree.tree_map(lambda m, g: (b2 * m + (1 - b2) * g).to(m.dtype), state.mu, grads)
        return updates, type(state)(state.count + 1, mu)

    def call(tensors: list[Tensor], runs: tuple[Any, ...], offset: int) -> Any:
        return torch.ops.zerofn.lion(*tensors, *runs, b1, b2, moments, offset)

    args = (learning_rate, b1, b2, weight_decay, mask, lr_scale, moments)
    return fused_rule("lion", args, init, update, call, ("mu",), learning_rate, constants)
