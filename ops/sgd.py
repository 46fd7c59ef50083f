"""`zerofn::sgd` and `zerofn::sgd_momentum`: gradient descent in the arithmetic of torch's non-fused loop.

In float32 and float64 that loop gives an element the same bits wherever in a buffer it lies; torch's fused
kernel does not. (In bfloat16 and float16 neither does.)
"""

from __future__ import annotations

from torch import Tensor

from .update_rule import by_blocks, define_rule, descend_


def _sgd(p: Tensor, grad: Tensor, rate: float | Tensor, decay: float) -> None:
    descend_(p, grad.add(p, alpha=decay) if decay else grad, rate)


def _momentum(
    p: Tensor, m: Tensor, grad: Tensor, rate: float | Tensor, decay: float, momentum: float, nesterov: bool
) -> None:
    if decay:
        grad = grad.add(p, alpha=decay)
    m.mul_(momentum).add_(grad)
    descend_(p, grad.add(m, alpha=momentum) if nesterov else m, rate)


define_rule("sgd", [], "", by_blocks(_sgd), lambda: ("sgd", {}))
define_rule(
    "sgd_momentum",
    ["m"],
    "float momentum, bool nesterov",
    by_blocks(_momentum),
    lambda momentum, nesterov: ("sgd_momentum", {"momentum": momentum, "nesterov": nesterov}),
)
