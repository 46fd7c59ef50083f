"""`zerofn::adamw`: one AdamW or Adam step on a flat shard, in torch's fused arithmetic.

Weight decay is decoupled (Loshchilov and Hutter 2019, Algorithm 2) or added to the gradient (Kingma and Ba 2015 with
L2).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from .._torch_compat import fused_adam_, fused_adamw_
from .kernel_args import Rule
from .reference import bits_of, floats_of, fma
from .update_rule import define_rule, gradient, rate_of


def _update(
    written: Sequence[Tensor],
    g: Tensor,
    count: Tensor,
    lr: Tensor | None,
    factor: Tensor | None,
    finite: Tensor | None,
    starts: Sequence[int],
    stops: Sequence[int],
    rates: Sequence[float],
    decays: Sequence[float],
    b1: float,
    b2: float,
    eps: float,
    decoupled: bool,
) -> None:
    p, m, v = written
    g = gradient(g, factor, p.dtype)
    step = count.to(p.device, torch.float32)
    found_inf = None if finite is None else finite.logical_not().to(p.device, torch.float32)
    runs = zip(rates, decays, starts, stops, strict=True)
    for (rate, decay), equal in groupby(runs, lambda run: run[:2]):  # one call for all of them
        now = rate_of(lr, rate)
        places = [slice(a, b) for _, _, a, b in equal]
        (fused_adamw_ if decoupled else fused_adam_)(
            [p[x] for x in places],
            [g[x] for x in places],
            [m[x] for x in places],
            [v[x] for x in places],
            [],
            [step] * len(places),
            # A tensor off the CPU alone: torch's kernels there read a float32. The CPU's take a float64 number.
            lr=now.float() if isinstance(now, Tensor) else now,
            beta1=b1,
            beta2=b2,
            weight_decay=decay,
            eps=eps,
            amsgrad=False,
            maximize=False,
            found_inf=found_inf,
        )


def _kernel(b1: float, b2: float, eps: float, decoupled: bool) -> tuple[str, dict[str, Any]]:
    return "adamw" if decoupled else "adam", {"b1": b1, "b2": b2, "eps": eps}


def _lossy(p: Tensor, m: Tensor, v: Tensor, g: Tensor, c: dict[str, Tensor]) -> None:
    """`zf_adam_lossy` of rules.h."""
    if c["l2"]:
        g = fma(p, c["l2"], g)
    p.mul_(c["shrink"])
    m.copy_(fma(c["c1"], g - m, m))
    v.copy_(fma(c["c2"], g * g - v, v))
    root = floats_of((bits_of(v) >> 1) + 0x1FBD1DF5)
    square = fma(root, 2 * c["near"], v + c["near"] * c["near"])
    y = floats_of(0x5F1FFFF9 - (bits_of(square) >> 1))
    p.copy_(fma(m * y * fma(-(square * y), y, torch.tensor(2.38924456)), c["quick"], p))


define_rule(
    "adamw",
    ["m", "v"],
    "float b1, float b2, float eps, bool decoupled",
    _kernel,
    {
        "adamw": Rule(0, 2, partial(_update, decoupled=True), _lossy, decoupled=True, corrected=True),
        "adam": Rule(0, 2, partial(_update, decoupled=False), _lossy, corrected=True),
    },
)
