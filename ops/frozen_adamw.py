"""`zerofn::frozen_adamw`: AdamW on a flat shard where v does not change any more (Tang et al. 2021, Algorithm 1).

It takes the next momentum as it is, or as the rows of signs that have come, and stores it in the place of the last one.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from . import cpu, cuda, native, sign_rows
from .codecs import MOMENTS, Parts
from .formats import kernels
from .kernel_args import RULES, Rule
from .registry import OnShard, Traits, define
from .sign_rows import Signs
from .update_rule import RUNS, by_blocks, decoded, descend_

_NAME = "frozen_adamw"


def _update(written: Sequence[Tensor], g: Tensor, count: Tensor, *rest: Any, b2: float, eps: float) -> None:
    root = (1 - b2 ** count.double()).sqrt().to(g.device, written[0].dtype)
    by_blocks(functools.partial(_step, root=root, eps=eps))(written, g, count, *rest)


def _step(p: Tensor, v: Tensor, grad: Tensor, rate: float | Tensor, decay: float, *, root: Tensor, eps: float) -> None:
    direction = torch.where(v > 0, grad / ((v.sqrt() / root) + eps), 0.0)
    if decay:
        p.mul_(1 - rate * decay)
    descend_(p, direction, rate)


RULES[_NAME] = Rule(4, 1, _update, decoupled=True, corrected=True)


def frozen_adamw_(
    p: Parts,
    m: Parts,
    v: Tensor,
    g: Tensor,
    count: Tensor,
    lr: Tensor | None,
    factor: Tensor | None,
    finite: Tensor | None,
    starts: Sequence[int],
    stops: Sequence[int],
    rates: Sequence[float],
    decays: Sequence[float],
    b2: float,
    eps: float,
    row: int = 0,
    block: int = 0,
    gaps: Sequence[int] = (),
) -> None:
    """Write the next momentum to `m`, and take the step -rate * (m * factor / (root of (v / (1 - b2^count)) + eps) +
    decay * p). An element whose v is zero stays as it is.

    `p`, `m`: the tensors that store them. `g`: the momentum; or with a `row` the rows of signs, uint8, that it came as:
    see `sign_rows.Signs`. `count`: how many updates have changed v. Other arguments: see `update_rule.define_rule`.
    """
    if finite is not None and finite.device.type == "cpu":
        if not finite:
            return
        finite = None
    size, served = v.numel(), kernels(v)
    signs = Signs(g.view(size // row, -1), row, block, gaps) if row else None
    runs: dict[str, Any] = {"starts": starts, "stops": stops, "rates": rates, "decays": decays}
    more: dict[str, Any] = {"count": count, "lr": lr, "factor": factor, "finite": finite}
    hyper: dict[str, Any] = {"b2": b2, "eps": eps}
    whole = len(m) == 1 and m[0].dtype is torch.float32 and m[0].is_contiguous()
    fits = whole and served is not None and served.can_update(_NAME, p, m[0], [[v]])
    if fits and served is cpu and cpu.missing() is None and finite is None:
        now = 1.0 if lr is None else float(lr)
        runs["rates"] = [now * x for x in rates]
        factors = () if factor is None else (float(factor),)
        update = cpu.prepared(_NAME, p, m[0], [[v]], **runs, factors=factors, hyper=hyper, count=int(count))
        if signs is None:
            m[0].view(-1).copy_(g.reshape(-1))
            cpu.run(update)
        else:
            signs.check(_NAME, size, v.device)
            native.in_parts(size, sign_rows.decoding_update(update, signs), block)
        return
    value = g.reshape(-1) if signs is None else sign_rows.decoded(signs)
    if fits and served is cuda:
        m[0].view(-1).copy_(value if finite is None else torch.where(finite, value, m[0].view(-1)))
        cuda.update_(_NAME, p, m[0], [[v]], **runs, **more, hyper=hyper)
        return
    with decoded(p, [m], MOMENTS[None], count, 0) as (master, momentum):
        momentum.copy_(value if finite is None else torch.where(finite, value.to(momentum.dtype), momentum))
        _update([master, v.reshape(-1).clone()], momentum, *more.values(), *runs.values(), **hyper)


def frozen_adamw(p: Tensor, m: Tensor, v: Tensor, g: Tensor, *rest: Any, **more: Any) -> tuple[Tensor, Tensor]:
    """The same in new tensors: (p, m)."""
    fresh = [x.clone(memory_format=torch.contiguous_format) for x in (p, m)]
    frozen_adamw_(fresh[:1], fresh[1:], v, g, *rest, **more)
    return fresh[0], fresh[1]


_REST = f"{RUNS}, float b2, float eps, int row=0, int block=0, int[] gaps=[]"
define(
    f"{_NAME}_(Tensor(a!)[] p, Tensor(b!)[] m, Tensor v, Tensor g, {_REST}) -> ()",
    frozen_adamw_,
    lambda *args, **more: None,
    traits=Traits(OnShard.KEEPS),
)
define(
    f"{_NAME}(Tensor p, Tensor m, Tensor v, Tensor g, {_REST}) -> (Tensor, Tensor)",
    frozen_adamw,
    lambda p, m, *args, **more: (p.new_empty(p.shape), m.new_empty(m.shape)),
    traits=Traits(OnShard.KEEPS),
)
