"""What elementwise update rules share: runs of constants, the gradient's factor, the finite check, two forms.

`define_rule` makes `zerofn::name`, which returns new tensors, and `zerofn::name_`, which writes, in the same order, the
arguments the other returns, each given as the list of tensors that store it (`Parts`). The kernels (`cpu`, or `cuda` on
a GPU) update a float32 master, whole or in halves, with moments in a format that they take stored. Anything else is
decoded, updated by torch's operations in the same arithmetic, and encoded.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from . import cpu, cuda
from .codecs import MOMENTS, PLAIN, Codec, MomentFormat, Parts, master_of
from .formats import kernels
from .kernel_args import RULES, Rule
from .reference import draws
from .registry import OnShard, Traits, define

BLOCK = 1 << 16  # elements: on the CPU a block's arrays stay in cache between the passes over it
RUNS = (
    "Tensor count, Tensor? lr, Tensor? factor, Tensor? finite, int[] starts, int[] stops, float[] rates, float[] decays"
)
PLACE = "str? moments, int offset"  # without defaults: a captured call leaves out what equals one
Step = Callable[..., None]
Update = Callable[..., None]


def define_rule(
    name: str, moments: Sequence[str], hyper: str, kernel: Callable[..., tuple[str, dict]], rules: Mapping[str, Rule]
) -> None:
    """Register both forms. `hyper`: the schema of what follows the runs, such as "float b1, float b2".
    `kernel(*hyper)`: the name of one of `rules`, and its hyperparameters by name.

    Arguments of either form: `p`, `g` and each moment, of one shape; `count`: int64 scalar, updates applied including
    this one; `lr`: None or a float scalar tensor the rates are multiplied by; `factor`: None or a scalar tensor the
    gradient is multiplied by; `finite`: None or a bool scalar tensor, where False nothing changes. Elements
    [starts[i], stops[i]) use learning rate `rates[i]` and weight decay `decays[i]`; elements of no run are left alone.
    `moments`: the format (of `codecs.MOMENTS`) whose numbers the moments are, and are rounded to after the update;
    `offset`: of the first element in its unit, which with `count` decides how moments are rounded.
    """
    num = len(moments)
    RULES.update(rules)

    def in_place(p: Parts, g: Tensor, *rest: Any) -> None:
        kept, (count, lr, factor, finite, *runs), tail = rest[:num], rest[num : num + 8], rest[num + 8 :]
        *constants, moments, offset = tail
        form = MOMENTS[moments]
        if finite is not None and finite.device.type == "cpu":
            if not finite:
                return
            finite = None
        made, served = kernel(*constants), kernels(g)
        if served is not None and form.kernels:
            with _encoded(kept, form) as held:
                if served is cuda and cuda.can_update(made[0], p, g, held):
                    _run_on_gpu(made, p, g, held, count, lr, factor, finite, runs, offset)
                    return
                if served is cpu and finite is None and cpu.can_update(made[0], p, g, held):
                    _run_kernel(made, p, g, held, count, lr, factor, runs, offset)
                    return
        _check_dtypes(name, p, kept, form)
        with decoded(p, kept, form, count, offset) as written:
            # An expanded gradient stays without strides in one dim; torch's fused rules read memory in order.
            given = written, g.reshape(-1).contiguous(), count, lr, factor, finite, *runs
            rules[made[0]].update(*given, **made[1])

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
def _encoded(moments: Sequence[Parts], form: MomentFormat) -> Iterator[Sequence[Parts]]:
    """Moments as kernels take them: what came as numbers of an encoded format is encoded, and decoded afterwards."""
    if not form.encoded or not moments or any(not PLAIN.stores(m) or m[0].dtype != torch.float32 for m in moments):
        yield moments
        return
    codecs = form.codecs[: len(moments)]
    coded = [codec.encode(m[0].contiguous()) for codec, m in zip(codecs, moments, strict=True)]
    yield coded
    for codec, m, parts in zip(codecs, moments, coded, strict=True):
        m[0].copy_(codec.decode(parts))


def _check_dtypes(name: str, p: Parts, moments: Sequence[Parts], form: MomentFormat) -> None:
    """Raise `TypeError` unless torch's operations can update what is stored so."""
    dtype = master_of(p).holds or p[0].dtype
    needed = {codec.holds for codec in form.codecs} - {None, dtype}
    if form.kernels and (form.encoded or any(m[0].dtype == torch.bfloat16 != dtype for m in moments)):
        why = f"{cuda.missing()} " if p[0].is_cuda and cuda.missing() else ""
        needed.add(torch.float32)
    else:
        why = ""
    if needed:
        where = ", and a device that has kernels for them" if form.kernels else ""
        raise TypeError(
            f"{name}: moments in{form.first.note.removeprefix(' in') or ' bfloat16'} need a float32 master{where}; "
            f"here the master is {str(dtype).removeprefix('torch.')}, on {p[0].device}. {why}"
            "Leave moments out, or write shard(..., precision='fp32') or shard(..., precision='bf16')."
        )


@contextlib.contextmanager
def decoded(
    p: Parts, moments: Sequence[Parts], form: MomentFormat, count: Tensor, offset: int
) -> Iterator[list[Tensor]]:
    """The master and the moments as flat tensors to write to. What is stored otherwise, or not in order, is a copy,
    which is put back afterwards; moments are rounded to their format."""
    formats = [PLAIN, *form.codecs[: len(moments)]]  # whose numbers the tensors are
    stored = [p, *moments]
    codecs = [master_of(p), *(c if c.stores(m) else PLAIN for c, m in zip(form.codecs, moments, strict=False))]
    flat = [codec.decode(parts).contiguous().view(-1) for codec, parts in zip(codecs, stored, strict=True)]
    yield flat
    for k, (codec, parts, x) in enumerate(zip(codecs, stored, flat, strict=True)):
        if formats[k] is not PLAIN:
            random = draws(int(count), offset, x.numel(), k - 1).to(x.device)
            _write(parts, codec, formats[k].encode(x, random), formats[k])
        elif codec is not PLAIN or not parts[0].is_contiguous():
            _write(parts, codec, codec.encode(x), codec)


def _write(parts: Parts, codec: Codec, fresh: Parts, encoded: Codec) -> None:
    """Write what `encoded` stores to parts that are `codec`'s: the same codec's, or the numbers themselves."""
    for part, x in zip(parts, fresh if codec is encoded else [encoded.decode(fresh)], strict=True):
        part.copy_(x.view(part.shape))


def by_blocks(step: Step) -> Update:
    """An update that runs `step(p, *moments, grad, rate, decay, **hyper)` on all blocks of all runs. A step writes `p`
    and the moments of one block of elements."""

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
        **hyper: Any,
    ) -> None:
        for start, stop, rate, decay in zip(starts, stops, rates, decays, strict=True):
            now = rate_of(lr, rate)
            for block in _blocks(start, stop, g):
                old = [x[block] for x in written]
                new = old if finite is None else [x.clone() for x in old]
                step(*new, gradient(g[block], factor, written[0].dtype), now, decay, **hyper)
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
