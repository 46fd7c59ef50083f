"""`zerofn::frozen_adamw`: AdamW on a flat shard where v does not change any more (Tang et al. 2021, Algorithm 1).

Its gradient is the average of gradients, to be divided by its correction as `factor`. `count` is that of v: how many
updates have changed it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .kernel_args import Rule
from .update_rule import by_blocks, define_rule, descend_


def _update(written: Sequence[Tensor], g: Tensor, count: Tensor, *rest: Any, b2: float, eps: float) -> None:
    root = (1 - b2 ** count.double()).sqrt().to(g.device, written[0].dtype)
    by_blocks(partial(_step, root=root, eps=eps))(written, g, count, *rest)


def _step(p: Tensor, v: Tensor, grad: Tensor, rate: float | Tensor, decay: float, *, root: Tensor, eps: float) -> None:
    direction = torch.where(v > 0, grad / ((v.sqrt() / root) + eps), 0.0)
    if decay:
        p.mul_(1 - rate * decay)
    descend_(p, direction, rate)


define_rule(
    "frozen_adamw",
    ["v"],
    "float b2, float eps",
    lambda b2, eps: ("frozen_adamw", {"b2": b2, "eps": eps}),
    {"frozen_adamw": Rule(4, 1, _update, decoupled=True, corrected=True)},
)
