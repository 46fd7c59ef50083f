"""What elementwise update rules share: runs of constants, the gradient's factor, the verdict, two forms, two makers.

`define_rule` makes `zerofn::name`, which returns new tensors, and `zerofn::name_`, which writes, in the same order, the
arguments the other returns, each given as the list of what keeps it (`Parts`). A float32 master, whole or in halves, is
updated by the kernels (`native` on the CPU, `cuda` on a GPU); anything else by torch's operations, in the same
arithmetic.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from . import cpu, cuda
from .formats import join, kernels, split
from .registry import OnShard, Traits, define

BLOCK = 1 << 16  # elements: on the CPU a block's arrays stay in cache between the passes over it
RUNS = (
    "Tensor count, Tensor? lr, Tensor? factor, Tensor? finite, int[] starts, int[] stops, float[] rates, float[] decays"
)
PLACE = "bool blocks, int offset"  # without defaults: a captured call leaves out what equals one
Parts = Sequence[Tensor]  # what keeps one tensor: itself, the halves of a split master, or 8-bit codes and scales
Step = Callable[..., None]
Update = Callable[..., None]


def define_rule(
    name: str, moments: Sequence[str], hyper: str, update: Update, kernel: Callable[..., tuple[str, dict]]
) -> None:
    """Register both forms. `hyper`: the schema of what follows the runs, such as "float b1, float b2";
    `update(written, g, count, lr, factor, finite, starts, stops, rates, decays, *hyper)`: the rule in torch's
    operations on flat tensors, in place; `kernel(*hyper)`: the name and the hyperparameters of the kernel.

    Arguments of either form: `p`, `g` and each moment, of one shape; `count`: int64 scalar, updates applied including
    this one; `lr`: None or a float scalar tensor the rates are multiplied by; `factor`: None or a scalar tensor the
    gradient is multiplied by; `finite`: None or a bool scalar tensor, where False nothing changes. Elements
    [starts[i], stops[i]) use learning rate `rates[i]` and weight decay `decays[i]`; elements of no run are left alone.
    `blocks`: moments are what 8-bit blocks can hold, rounded to that after the update; `offset`: of the first element
    in its unit, which with `count` decides how bfloat16 and 8-bit moments are rounded.
    """
    num = len(moments)

    def in_place(p: Parts, g: Tensor, *rest: Any) -> None:
        kept, (count, lr, factor, finite, *runs), tail = rest[:num], rest[num : num + 8], rest[num + 8 :]
        *constants, blocks, offset = tail
        if finite is not None and finite.device.type == "cpu":
            if not finite:
                return
            finite = None
        with _as_blocks(kept, blocks) as held:
            served, made = kernels(g), kernel(*constants)
            if served is cuda and cuda.can_update(made[0], p, g, held):
                _run_on_gpu(made, p, g, held, count, lr, factor, finite, runs, offset)
                return
            if served is cpu and finite is None and cpu.can_update(made[0], p, g, held):
                _run_kernel(made, p, g, held, count, lr, factor, runs, offset)
                return
        _check_plain(name, p, kept, blocks)
        with opened(p, *kept) as written:
            update(written, g.reshape(-1), count, lr, factor, finite, *runs, *constants)

    def pure(p: Tensor, g: Tensor, *rest: Any) -> Any:
        fresh = [x.clone(memory_format=torch.contiguous_format) for x in (p, *rest[:num])]
        in_place(fresh[:1], g, *([x] for x in fresh[1:]), *rest[num:])
        return tuple(fresh) if num else fresh[0]

    def fake(p: Tensor, g: Tensor, *rest: Any) -> Any:
        fresh = [x.new_empty(x.shape) for x in (p, *rest[:num])]
        return tuple(fresh) if num else fresh[0]

    tail = ", ".join([RUNS, hyper, PLACE] if hyper else [RUNS, PLACE])
    writes = [f"Tensor({chr(ord('b') + k)}!)[] {m}, " for k, m in enumerate(moments)]
    reads = [f"Tensor {m}, " for m in moments]
    results = f"({', '.join(['Tensor'] * (1 + num))})" if num else "Tensor"
    define(
        f"{name}_(Tensor(a!)[] p, Tensor g, {''.join(writes)}{tail}) -> ()",
        in_place,
        lambda *a: None,
        traits=Traits(OnShard.KEEPS),
    )
    define(f"{name}(Tensor p, Tensor g, {''.join(reads)}{tail}) -> {results}", pure, fake, traits=Traits(OnShard.KEEPS))


def _run_kernel(
    kernel: tuple[str, dict[str, Any]],
    p: Parts,
    g: Tensor,
    moments: Sequence[Parts],
    count: Tensor,
    lr: Tensor | None,
    factor: Tensor | None,
    runs: Sequence[Any],
    offset: int,
) -> None:
    starts, stops, rates, decays = runs
    now = 1.0 if lr is None else float(lr)
    cpu.update_(
        kernel[0],
        p,
        g,
        moments,
        starts=starts,
        stops=stops,
        rates=[now * x for x in rates],
        decays=decays,
        factors=() if factor is None else (float(factor),),
        hyper=kernel[1],
        count=int(count),
        offset=offset,
    )


def _run_on_gpu(
    kernel: tuple[str, dict[str, Any]],
    p: Parts,
    g: Tensor,
    moments: Sequence[Parts],
    count: Tensor,
    lr: Tensor | None,
    factor: Tensor | None,
    finite: Tensor | None,
    runs: Sequence[Any],
    offset: int,
) -> None:
    starts, stops, rates, decays = runs
    cuda.update_(
        kernel[0],
        p,
        g,
        moments,
        starts=starts,
        stops=stops,
        rates=rates,
        decays=decays,
        hyper=kernel[1],
        count=count,
        lr=lr,
        factor=factor,
        finite=finite,
        offset=offset,
    )


@contextlib.contextmanager
def _as_blocks(moments: Sequence[Parts], blocks: bool) -> Iterator[Sequence[Parts]]:
    """Moments as the kernels take them: what is to be rounded to 8-bit blocks goes through them."""
    served = kernels(moments[0][0]) if blocks and moments else None
    if served is None or any(len(m) > 1 or m[0].dtype != torch.float32 for m in moments):
        yield moments
        return
    whole = [m[0].contiguous() for m in moments]
    coded = [served.encode(x.view(-1), k == 0) for k, x in enumerate(whole)]
    yield coded
    for k, (m, x, parts) in enumerate(zip(moments, whole, coded, strict=True)):
        served.decode(*parts, k == 0, x.view(-1))
        if x is not m[0]:
            m[0].copy_(x)


def _check_plain(name: str, p: Parts, moments: Sequence[Parts], blocks: bool) -> None:
    if blocks or any(len(m) > 1 or m[0].dtype == torch.bfloat16 != p[0].dtype for m in moments):
        why = f"{cuda.missing()} " if p[0].is_cuda and cuda.missing() else ""
        raise TypeError(
            f"{name}: moments in 8-bit blocks or bfloat16 go with a float32 master, where there are "
            f"kernels for it; got a {str(p[0].dtype).removeprefix('torch.')} one on {p[0].device}. {why}"
            "Leave moments out, or write shard(..., precision='fp32') or 'bf16'."
        )


@contextlib.contextmanager
def opened(*kept: Parts) -> Iterator[list[Tensor]]:
    """Flat tensors to write to: what is kept otherwise, or not in order, is a copy that is put back."""
    flat = [(join(*parts) if len(parts) > 1 else parts[0]).contiguous().view(-1) for parts in kept]
    yield flat
    for parts, y in zip(kept, flat, strict=True):
        if len(parts) > 1 or not parts[0].is_contiguous():
            for part, fresh in zip(parts, split(y) if len(parts) > 1 else [y], strict=True):
                part.copy_(fresh.view(part.shape))


def by_blocks(step: Step) -> Update:
    """An update that runs `step(p, *moments, grad, rate, decay, *hyper)`, which writes `p` and the moments of one block
    of elements, on all blocks of all runs."""

    def update(
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
        *hyper: Any,
    ) -> None:
        for start, stop, rate, decay in zip(starts, stops, rates, decays, strict=True):
            now = rate_of(lr, rate)
            for block in _blocks(start, stop, g):
                old = [x[block] for x in written]
                new = old if finite is None else [x.clone() for x in old]
                step(*new, gradient(g[block], factor, written[0].dtype), now, decay, *hyper)
                if finite is not None:
                    for x, y in zip(old, new, strict=True):
                        torch.where(finite, y, x, out=x)

    return update


def _blocks(start: int, stop: int, like: Tensor) -> Iterator[slice]:
    size = BLOCK if like.device.type == "cpu" else max(1, stop - start)
    for first in range(start, stop, size):
        yield slice(first, min(first + size, stop))


def gradient(g: Tensor, factor: Tensor | None, dtype: torch.dtype) -> Tensor:
    """`g * factor` in `dtype`."""
    g = g if g.dtype == dtype else g.to(dtype)
    return g if factor is None else g * factor.to(dtype)


def rate_of(lr: Tensor | None, rate: float) -> float | Tensor:
    """`lr * rate`: a float where reading `lr` waits for no device."""
    if lr is None:
        return rate
    return float(lr) * rate if lr.device.type == "cpu" else lr * rate


def descend_(p: Tensor, direction: Tensor, rate: float | Tensor) -> None:
    """p -= rate * direction, as torch's non-fused optimizers do it: one multiply-add."""
    if isinstance(rate, Tensor):
        p.addcmul_(direction, rate.to(p.dtype), value=-1)
    else:
        p.add_(direction, alpha=-rate)
