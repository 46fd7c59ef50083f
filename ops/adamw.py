"""`zerofn::adamw`: one AdamW step on a flat piece, in torch's fused arithmetic."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from .._torch_compat import fused_adam_, fused_adamw_
from .library import define
from .rule import Parts, gradient, opened, rate_of

_SCHEMA = (
    "Tensor count, Tensor? lr, Tensor? factor, Tensor? finite, int[] starts, int[] stops, float[] rates, "
    "float[] decays, float b1, float b2, float eps, bool decoupled)"
)


def adamw_(
    p: Parts,
    g: Tensor,
    m: Parts,
    v: Parts,
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
    """Update p, m, v [size], each given as what keeps it, from g [size]; where `finite` is False nothing changes.

    `count`: int64 scalar, updates applied including this one. Elements [starts[i], stops[i]) use learning
    rate `rates[i]` (times `lr`, a float64 scalar, if given) and weight decay `decays[i]`: decoupled
    (Loshchilov and Hutter 2019, Algorithm 2) or added to the gradient (Kingma and Ba 2015 with L2).
    """
    if finite is not None and finite.device.type == "cpu":
        if not finite:
            return
        finite = None
    fused = fused_adamw_ if decoupled else fused_adam_
    with opened(p, m, v) as (param, mean, square):
        g = gradient(g.reshape(-1), factor, param.dtype)
        step = count.to(param.device, torch.float32)
        found_inf = None if finite is None else finite.logical_not().to(param.device, torch.float32)
        runs = zip(rates, decays, starts, stops, strict=True)
        for (rate, decay), equal in groupby(runs, lambda run: run[:2]):  # one call for all of them
            now = rate_of(lr, rate)
            places = [slice(a, b) for _, _, a, b in equal]
            fused(
                [param[x] for x in places],
                [g[x] for x in places],
                [mean[x] for x in places],
                [square[x] for x in places],
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


def adamw(p: Tensor, g: Tensor, m: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    """The same, on copies: -> new (p, m, v)."""
    p, m, v = (x.clone(memory_format=torch.contiguous_format) for x in (p, m, v))
    adamw_([p], g, [m], [v], *rest)
    return p, m, v


define(f"adamw_(Tensor(a!)[] p, Tensor g, Tensor(b!)[] m, Tensor(c!)[] v, {_SCHEMA} -> ()", adamw_, lambda *a: None)
define(
    f"adamw(Tensor p, Tensor g, Tensor m, Tensor v, {_SCHEMA} -> (Tensor, Tensor, Tensor)",
    adamw,
    lambda p, g, m, v, *rest: tuple(x.new_empty(x.shape) for x in (p, m, v)),
)
