"""The CPU kernels of `ops/csrc`: update rules on fp32 or split masters with fp32, bf16 or 8-bit moments, in one pass.

All tensors are contiguous and on the CPU. Results do not depend on the number of threads, nor on the instruction set,
nor on whether the library (`native`) is there: without it `reference` does the same with torch's operations, more
slowly.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from . import reference
from .kernel_args import (
    BLOCK,
    GRADIENTS,
    RULES,
    check_run_lists,
    check_tensor,
    check_tensors,
    moment_format,
    num_blocks,
    pair,
    rates_of,
)
from .native import elementwise, goes_far, in_parallel, in_parts, kernel
from .native import isa as isa
from .native import isas as isas
from .native import missing as missing

_NUMBERS = {dtype: i for i, dtype in enumerate(GRADIENTS)}  # zf_number


_NAMES = ("rate", "shrink", "l2", "b1", "c1", "b2", "c2", "root", "eps", "quick", "near")


class _Rates(ctypes.Structure):
    _fields_ = [(name, ctypes.c_float) for name in _NAMES]
    _fields_ += [("nesterov", ctypes.c_int32)]


class _Run(ctypes.Structure):
    _fields_ = [("start", ctypes.c_int64), ("stop", ctypes.c_int64), ("rates", _Rates)]


class _Update(ctypes.Structure):
    _fields_ = [
        ("rule", ctypes.c_int32),
        ("g_number", ctypes.c_int32),
        ("format", ctypes.c_int32),
        ("factors", ctypes.c_float * 2),
        ("p", ctypes.c_void_p),
        ("lo", ctypes.c_void_p),
        ("g", ctypes.c_void_p),
        ("moments", ctypes.c_void_p * 2),
        ("scales", ctypes.c_void_p * 2),
        ("key", ctypes.c_uint64),
        ("offset", ctypes.c_int64),
        ("size", ctypes.c_int64),
        ("num_runs", ctypes.c_int64),
        ("runs", ctypes.POINTER(_Run)),
    ]


def can_update(rule: str, p: Sequence[Tensor], g: Tensor, moments: Sequence[Sequence[Tensor]]) -> bool:
    """Whether `update_` takes these: the rule is known, everything is on the CPU, in dtypes that it knows."""
    try:
        check_tensors(rule, p, g, moments)
    except (TypeError, ValueError):
        return False
    return True


def update_(
    rule: str,
    p: Sequence[Tensor],
    g: Tensor,
    moments: Sequence[Sequence[Tensor]],
    *,
    starts: Sequence[int],
    stops: Sequence[int],
    rates: Sequence[float],
    decays: Sequence[float],
    factors: Sequence[float] = (),
    hyper: dict[str, Any],
    count: int,
    offset: int = 0,
) -> None:
    """One step of a rule of `kernel_args.RULES` on a shard, in place.

    `p`: [fp32 [size]], or a split master [bfloat16 [size], int16 [size]]. `g`: [size], fp32, bf16 or fp16, made fp32
    and then multiplied by each of up to two `factors`. `moments`: as many as the rule has, each [fp32], [bf16] or
    [uint8 codes [size], fp32 scales [ceil(size / 256)]]; the latter two are rounded stochastically.
    Run i, elements [starts[i], stops[i]), has learning rate `rates[i]` and weight decay `decays[i]`; runs are in
    order and apart, and elements of none keep their values (in 8-bit blocks: as far as a new scale lets them).
    `hyper`: the rule's hyperparameters by name. `count`: updates applied including this one. `offset`: the global
    index of element 0 in its unit, a multiple of 2,048: with `count` it decides the random bits.

    Bit for bit torch's arithmetic in fp32, on x86 with AVX2: its fused Adam, its loops for the others. A run is a
    tensor in this: its last (length % 8) elements are rounded as torch rounds the end of a tensor.
    Raises `TypeError` and `ValueError` before anything is written.
    """
    check_tensors(rule, p, g, moments)
    check_run_lists(g.numel(), starts, stops, rates, decays, factors, offset)
    given: dict[str, Any] = {"starts": starts, "stops": stops, "rates": rates, "decays": decays}
    given |= {"factors": factors, "hyper": hyper, "count": count, "offset": offset}
    if missing():
        reference.update_(rule, p, g, moments, **given)
    else:
        run(prepared(rule, p, g, moments, **given))


def prepared(
    rule: str,
    p: Sequence[Tensor],
    g: Tensor,
    moments: Sequence[Sequence[Tensor]],
    *,
    starts: Sequence[int],
    stops: Sequence[int],
    rates: Sequence[float],
    decays: Sequence[float],
    factors: Sequence[float] = (),
    hyper: dict[str, Any],
    count: int,
    offset: int = 0,
) -> _Update:
    """The library's description of what `update_` does."""
    a = _tensors_of(rule, p, g, moments, factors)
    runs = _runs_of(rule, starts, stops, rates, decays, hyper, count)
    a.key, a.offset, a.size, a.num_runs, a.runs = count, offset, g.numel(), len(runs), runs
    return a


def run(a: _Update) -> None:
    """Run an update that was prepared."""
    if not a.num_runs:
        return
    update = kernel("update")
    first = a.runs[0].start // BLOCK * BLOCK
    size = num_blocks(a.runs[a.num_runs - 1].stop - first) * BLOCK  # whole blocks: one touched gets a new scale
    in_parts(size, lambda at, end: update(ctypes.byref(a), first + at, min(first + end, a.size)))


def _runs_of(
    rule: str,
    starts: Sequence[int],
    stops: Sequence[int],
    rates: Sequence[float],
    decays: Sequence[float],
    hyper: dict[str, Any],
    count: int,
) -> Any:
    """The library's description of runs; those with equal constants share them."""
    runs = (_Run * len(starts))()
    known: dict[tuple[float, float], _Rates] = {}
    for run, start, stop, constants in zip(runs, starts, stops, zip(rates, decays, strict=True), strict=True):
        if constants not in known:
            known[constants] = _Rates(**rates_of(rule, *constants, hyper, count))
        run.start, run.stop, run.rates = start, stop, known[constants]
    return runs


def _tensors_of(
    rule: str, p: Sequence[Tensor], g: Tensor, moments: Sequence[Sequence[Tensor]], factors: Sequence[float]
) -> _Update:
    """The library's description of an update, all but its runs."""
    a = _Update(rule=RULES[rule].number, g_number=_NUMBERS[g.dtype])
    a.factors[:] = [*factors, 1.0, 1.0][:2]
    a.g = g.data_ptr()
    a.p, a.lo = _addresses(p)
    for i, moment in enumerate(moments):
        a.format = moment_format(moment)
        a.moments[i], a.scales[i] = _addresses(moment)
    return a


def _addresses(parts: Sequence[Tensor]) -> list[int | None]:
    return [None if x is None else x.data_ptr() for x in pair(parts)]


def norm2_and_extreme(parts: Sequence[Tensor]) -> list[tuple[float, float]]:
    """(2-norm, largest magnitude) of each part, fp32, bf16 or fp16 [any size], in one read.

    The norm is summed in fp32 in the order of `torch.linalg.vector_norm(x, dtype=torch.float32)` on one thread.
    A NaN or inf in a part makes its magnitude NaN or inf.
    """
    for x in parts:
        check_tensor("norm2_and_extreme: a part", x, GRADIENTS)
    if missing():
        return [reference.norm2_and_extreme(x) for x in parts]
    function = kernel("norm2_and_extreme")
    results = (ctypes.c_float * 2 * len(parts))()

    def one(i: int) -> None:
        function(parts[i].data_ptr(), _NUMBERS[parts[i].dtype], parts[i].numel(), ctypes.addressof(results[i]))

    in_parallel([functools.partial(one, i) for i in range(len(parts))], sum(x.numel() for x in parts))
    return [(norm, extreme) for norm, extreme in results]


def split(p: Tensor, out: Sequence[Tensor] | None = None) -> tuple[Tensor, Tensor]:
    """fp32 -> (bfloat16, int16) of its shape, exact; a NaN becomes the one NaN. See formats.h."""
    check_tensor("split: p", p, (torch.float32,))
    hi, lo = out or (torch.empty_like(p, dtype=torch.bfloat16), torch.empty_like(p, dtype=torch.int16))
    check_tensor("split: out", hi, (torch.bfloat16,), p.numel())
    check_tensor("split: out", lo, (torch.int16,), p.numel())
    if missing():
        reference.split(p, (hi, lo))
    else:
        elementwise("split", p.numel(), (p, 4), (hi, 2), (lo, 2))
    return hi, lo


def join(hi: Tensor, lo: Tensor, out: Tensor | None = None) -> Tensor:
    """(bfloat16, int16) -> the fp32 they were split from."""
    check_tensor("join: hi", hi, (torch.bfloat16,))
    check_tensor("join: lo", lo, (torch.int16,), hi.numel())
    p = torch.empty_like(hi, dtype=torch.float32) if out is None else out
    check_tensor("join: out", p, (torch.float32,), hi.numel())
    if missing():
        reference.join(hi, lo, p)
    else:
        elementwise("join", p.numel(), (hi, 2), (lo, 2), (p, 4))
    return p


def encode(x: Tensor, signed: bool, out: Sequence[Tensor] | None = None) -> tuple[Tensor, Tensor]:
    """fp32 -> (uint8 codes of its shape, fp32 scales [ceil(size / 256)]), rounded to nearest. See formats.h.

    Relative error at most 1/16 down to 2^-30 (signed: 2^-14) of the largest of each 256; without `signed`, x >= 0.
    """
    check_tensor("encode: x", x, (torch.float32,))
    codes, scales = out or (torch.empty_like(x, dtype=torch.uint8), torch.empty(num_blocks(x.numel())))
    check_tensor("encode: out", codes, (torch.uint8,), x.numel())
    check_tensor("encode: out", scales, (torch.float32,), num_blocks(x.numel()))
    if missing():
        reference.encode(x, signed, (codes, scales))
    else:
        elementwise("encode", x.numel(), (x, 4), (codes, 1), (scales, 4 / BLOCK), last=int(signed))
    return codes, scales


def decode(codes: Tensor, scales: Tensor, signed: bool, out: Tensor | None = None) -> Tensor:
    """What `encode` made -> fp32 of the codes' shape."""
    check_tensor("decode: codes", codes, (torch.uint8,))
    check_tensor("decode: scales", scales, (torch.float32,), num_blocks(codes.numel()))
    x = torch.empty_like(codes, dtype=torch.float32) if out is None else out
    check_tensor("decode: out", x, (torch.float32,), codes.numel())
    if missing():
        reference.decode(codes, scales, signed, x)
    else:
        elementwise("decode", x.numel(), (codes, 1), (scales, 4 / BLOCK), (x, 4), last=int(signed))
    return x


def to_bf16(x: Tensor, out: Tensor) -> None:
    """Write fp32 [n] as the nearest bfloat16, ties to even, with the bits of torch's cast, to `out`, bfloat16 [n]."""
    check_tensor("to_bf16: x", x, (torch.float32,))
    check_tensor("to_bf16: out", out, (torch.bfloat16,), x.numel())
    if missing():
        out.copy_(x)
        return
    function, far = kernel("to_bf16"), goes_far(out)
    in_parts(x.numel(), lambda at, end: function(x.data_ptr(), out.data_ptr(), at, end, far))


def sum_bf16(rows: Sequence[Tensor], out: Tensor) -> None:
    """Write the sum of bfloat16 rows [n] each, added in their order in fp32, to `out`, fp32 [n], in one pass."""
    check_tensor("sum_bf16: out", out, (torch.float32,))
    for x in rows:
        check_tensor("sum_bf16: a row", x, (torch.bfloat16,), out.numel())
    if not rows:
        raise ValueError("sum_bf16: there are no rows.")
    if missing():
        reference.sum_bf16(rows, out)
        return
    function, addresses = kernel("sum_bf16"), (ctypes.c_void_p * len(rows))(*[x.data_ptr() for x in rows])
    given, far = (addresses, len(rows), out.data_ptr()), goes_far(out)
    in_parts(out.numel(), lambda at, end: function(*given, at, end, far))


def checksum(memory: Tensor | int, num_bytes: int | None = None) -> int:
    """64 bits that depend on every byte and where it stands. `memory`: a contiguous tensor, or an address."""
    if isinstance(memory, Tensor):
        check_tensor("checksum: memory", memory, (memory.dtype,))
        held = memory.numel() * memory.element_size()
        num_bytes = held if num_bytes is None else num_bytes
        if num_bytes > held:
            raise ValueError(f"checksum: the tensor has {held} bytes, and {num_bytes} are asked for.")
    if num_bytes is None or num_bytes < 0:
        raise ValueError(f"checksum: num_bytes must say how many bytes there are, got {num_bytes}.")
    address = memory.data_ptr() if isinstance(memory, Tensor) else memory
    return reference.checksum(address, num_bytes) if missing() else kernel("checksum")(address, num_bytes)
