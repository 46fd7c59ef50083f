"""`zerofn::renew`: a new value in place of an old one, unless a step is skipped. A rule like others, so that a captured
step writes it to the state's memory, or leaves that alone, in one pass.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .kernel_args import Rule
from .update_rule import by_blocks, define_rule


def _renew(p: Tensor, grad: Tensor, rate: float, decay: float) -> None:
    p.copy_(grad)


define_rule("renew", [], "", lambda: ("renew", {}), {"renew": Rule(5, 0, by_blocks(_renew))})


def renewed(old: Tensor, new: Tensor, *, finite: Tensor, count: Tensor) -> Tensor:
    """Return `new`, or `old` where the finite check, a bool scalar tensor, is False; of one shape and dtype.

    `count`: any int64 scalar, since rules are told how many updates there were.
    """
    runs = [0], [old.numel()], [1.0], [0.0]
    return torch.ops.zerofn.renew(old, new, count, None, None, finite, *runs, None, 0)
