"""`zerofn::sgd` and `zerofn::sgd_momentum`: gradient descent in the arithmetic of torch's non-fused loop.

In float32 and float64 that loop gives an element the same bits wherever in a buffer it lies; torch's fused
kernel does not. (In bfloat16 and float16 neither does.)
"""

from __future__ import annotations

from torch import Tensor

from .kernel_args import Rule
from .update_rule import by_blocks, define_rule, descend_


def _sgd(p: Tensor, grad: Tensor, rate: float | Tensor, decay: float) -> None:
    descend_(p, grad.add(p, alpha=decay) if decay else grad, rate)


def _momentum(
    p: Tensor, m: Tensor, grad: Tensor, rate: float | Tensor, decay: float, b1: float, nesterov: bool
) -> None:
    if decay:
        grad = grad.add(p, alpha=decay)
    m.mul_(b1).add_(grad)
    descend_(p, grad.add(m, alpha=b1) if nesterov else m, rate)


define_rule("sgd", [], "", lambda: ("sgd", {}), {"sgd": Rule(2, 0, by_blocks(_sgd))})
define_rule(
    "sgd_momentum",
    ["m"],
    "float momentum, bool nesterov",
    lambda momentum, nesterov: ("sgd_momentum", {"b1": momentum, "nesterov": nesterov}),
    {"sgd_momentum": Rule(3, 1, by_blocks(_momentum))},
)
