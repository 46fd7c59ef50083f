"""`zerofn::lion`: one step of Lion (Chen et al. 2023, Algorithm 2)."""

from __future__ import annotations

from torch import Tensor

from .kernel_args import Rule
from .update_rule import by_blocks, define_rule, descend_


def _lion(p: Tensor, m: Tensor, grad: Tensor, rate: float | Tensor, decay: float, b1: float, b2: float) -> None:
    direction = m.mul(b1).add_(grad, alpha=1 - b1).sign_()
    if decay:
        p.mul_(1 - rate * decay)
    descend_(p, direction, rate)
    m.mul_(b2).add_(grad, alpha=1 - b2)


define_rule(
    "lion",
    ["m"],
    "float b1, float b2",
    lambda b1, b2: ("lion", {"b1": b1, "b2": b2}),
    {"lion": Rule(1, 1, by_blocks(_lion), decoupled=True)},
)
