"""What elementwise update rules share: runs of constants, the gradient's factor, the verdict, two forms.

A rule is one function `step(p, *moments, grad, rate, decay, *hyper)` that writes `p` and the moments of one
block of elements. `define_rule` makes of it `zerofn::name`, which returns new tensors, and `zerofn::name_`,
which writes, in the same order, the arguments the other returns: each of them as the list of what keeps it (`Parts`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from .formats import join, split
from .library import define

BLOCK = 1 << 16  # elements: on the CPU a block's arrays stay in cache between the passes over it
RUNS = "Tensor? lr, Tensor? factor, Tensor? finite, int[] starts, int[] stops, float[] rates, float[] decays"
Step = Callable[..., None]
Parts = Sequence[Tensor]  # what keeps one tensor: itself, or the two halves of a split master


def define_rule(name: str, moments: Sequence[str], hyper: str, step: Step) -> None:
    """Register both forms. `hyper`: the schema of what follows the runs, such as "float b1, float b2".

    Arguments of either: `p`, `g` and each moment, of one shape; `lr`: None or a float scalar tensor the rates
    are multiplied by; `factor`: None or a scalar tensor the gradient is multiplied by; `finite`: None or a
    bool scalar tensor, where False nothing changes. Elements [starts[i], stops[i]) use learning rate
    `rates[i]` and weight decay `decays[i]`; elements of no run are left alone.
    """
    num = len(moments)

    def in_place(p: Parts, g: Tensor, *rest: Any) -> None:
        with opened(p, *rest[:num]) as written:
            _update(step, written, g, *rest[num:])

    def pure(p: Tensor, g: Tensor, *rest: Any) -> Any:
        fresh = [x.clone(memory_format=torch.contiguous_format) for x in (p, *rest[:num])]
        in_place(fresh[:1], g, *([x] for x in fresh[1:]), *rest[num:])
        return tuple(fresh) if num else fresh[0]

    def fake(p: Tensor, g: Tensor, *rest: Any) -> Any:
        fresh = [x.new_empty(x.shape) for x in (p, *rest[:num])]
        return tuple(fresh) if num else fresh[0]

    tail = ", ".join([RUNS, hyper] if hyper else [RUNS])
    writes = [f"Tensor({chr(ord('b') + k)}!)[] {m}, " for k, m in enumerate(moments)]
    reads = [f"Tensor {m}, " for m in moments]
    results = f"({', '.join(['Tensor'] * (1 + num))})" if num else "Tensor"
    define(f"{name}_(Tensor(a!)[] p, Tensor g, {''.join(writes)}{tail}) -> ()", in_place, lambda *a: None)
    define(f"{name}(Tensor p, Tensor g, {''.join(reads)}{tail}) -> {results}", pure, fake)


@contextlib.contextmanager
def opened(*kept: Parts) -> Iterator[list[Tensor]]:
    """Flat tensors to write to: what is kept otherwise, or not in order, is a copy that is put back."""
    flat = [(join(*parts) if len(parts) > 1 else parts[0]).contiguous().view(-1) for parts in kept]
    yield flat
    for parts, y in zip(kept, flat, strict=True):
        if len(parts) > 1 or not parts[0].is_contiguous():
            for part, fresh in zip(parts, split(y) if len(parts) > 1 else [y], strict=True):
                part.copy_(fresh.view(part.shape))


def _update(
    step: Step,
    written: Sequence[Tensor],
    g: Tensor,
    lr: Tensor | None,
    factor: Tensor | None,
    finite: Tensor | None,
    starts: Sequence[int],
    stops: Sequence[int],
    rates: Sequence[float],
    decays: Sequence[float],
    *hyper: Any,
) -> None:
    if finite is not None and finite.device.type == "cpu":
        if not finite:
            return
        finite = None
    g = g.reshape(-1)
    for start, stop, rate, decay in zip(starts, stops, rates, decays, strict=True):
        now = rate_of(lr, rate)
        for block in _blocks(start, stop, g):
            old = [x[block] for x in written]
            new = old if finite is None else [x.clone() for x in old]
            step(*new, gradient(g[block], factor, written[0].dtype), now, decay, *hyper)
            if finite is not None:
                for x, y in zip(old, new, strict=True):
                    torch.where(finite, y, x, out=x)


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
