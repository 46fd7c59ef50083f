"""Matrix products of float8 numbers: `zerofn::fp8_scale`, `fp8_codes`, `fp8_turned`, `fp8_both` and `fp8_mm`.

[Note: float8 products] A tensor gets one scale, the recipe that torchao calls tensorwise; inputs and weights are e4m3,
gradients of outputs e5m2 (Micikevicius et al. 2022, section 3). The scale is a power of two, the least with which the
largest element fits. So an element is divided without rounding and rounded once, to float8; codes do not depend on who
computes them; and what was decoded has the same codes again. Such a scale costs nothing where numbers are normal ones
of float8, since these are floating-point numbers themselves.

Devices multiply rows by rows: a [m, k] by b [n, k], k contiguous in both. Forward that is x by w. Backward it is the
gradient of the output by w turned, and that gradient turned by x turned. Codes are turned, so no number is rounded
twice. On a GPU one kernel makes both in one read (`csrc/cuda.cu`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from .._torch_compat import scaled_mm
from . import cuda
from .formats import kernels
from .kernel_args import GRADIENTS
from .registry import OnShard, Traits, define

ALIGNED = 16  # devices multiply blocks of this number of elements
_DTYPES = {False: torch.float8_e4m3fn, True: torch.float8_e5m2}
_ROOM = {False: 8, True: 15}  # the largest number is 1.75 times two to this
_EXPONENT = 23  # where a float32 has its exponent, which is biased by 127
_LEAST = (127 - 100) << _EXPONENT  # bits of 2^-100: the product of two scales and of a code should not vanish
_UP = (1 << (_EXPONENT - 2)) - 1  # carries into the exponent where a fraction is above 1.75


def fp8_scale(x: Tensor, grad: bool) -> Tensor:
    """Numbers of any shape -> their scale, float32: x / scale fits into e4m3, or with `grad` into e5m2. NaN where one
    of them is not finite.

    A scale is at least 2^-100. So a tensor whose largest element is at most 2^-110 (8e-34), or with `grad` 2^-117
    (6e-36), becomes zeros.
    """
    top = torch.linalg.vector_norm(x, torch.inf).to(torch.float32)
    if kernels(x) is cuda:
        scale = torch.empty_like(top)
        cuda.launch("fp8_scale", x.device, 1, top, grad, scale)
        return scale
    bits = top.view(torch.int32) + (_UP - (_ROOM[grad] << _EXPONENT))
    scale = bits.clamp_(min=_LEAST).bitwise_and_(0xFF << _EXPONENT).view(torch.float32)
    return scale.add_(top - top)


def fp8_codes(x: Tensor, scale: Tensor, grad: bool) -> Tensor:
    """Numbers -> the bits of x / scale in float8, uint8: rounded to nearest, ties to even."""
    if kernels(x) is cuda:
        codes = x.new_empty(x.shape, dtype=torch.uint8)
        _convert(x, scale, grad, codes, None)
        return codes
    return torch.div(x, scale).to(_DTYPES[grad]).view(torch.uint8).contiguous()


def fp8_turned(x: Tensor, scale: Tensor | None = None, grad: bool = False) -> Tensor:
    """Codes [m, k], or with a scale numbers -> their codes, turned in memory of their own: [k, m] with m rounded up to
    16, and zeros there.
    """
    out = _empty_turned(x)
    if kernels(x) is cuda:
        _convert(x, scale, grad, None, out)
        return out
    codes = x if scale is None else fp8_codes(x, scale, grad)
    out[:, : len(x)].copy_(codes.t())
    out[:, len(x) :].zero_()
    return out


def fp8_both(x: Tensor, scale: Tensor, grad: bool) -> tuple[Tensor, Tensor]:
    """Numbers [m, k] -> (their codes, the codes turned)."""
    if kernels(x) is cuda:
        codes, out = x.new_empty(x.shape, dtype=torch.uint8), _empty_turned(x)
        _convert(x, scale, grad, codes, out)
        return codes, out
    codes = fp8_codes(x, scale, grad)
    return codes, fp8_turned(codes)


def _empty_turned(x: Tensor) -> Tensor:
    rows, columns = x.shape
    return x.new_empty(columns, -(-rows // ALIGNED) * ALIGNED, dtype=torch.uint8)


def _convert(x: Tensor, scale: Tensor | None, grad: bool, codes: Tensor | None, turned: Tensor | None) -> None:
    """Fill codes, turned ones, or both, on a GPU."""
    rows = x.contiguous().view(-1, x.shape[-1])
    number = GRADIENTS.index(x.dtype) if scale is not None else None
    high, (_, wide) = len(rows) if turned is None else turned.shape[1], rows.shape
    num_warps = -(-high // 32) * -(-wide // 64)
    cuda.launch("fp8", x.device, num_warps, rows, number, scale, grad, *rows.shape, codes, turned, high)


def fp8_mm(
    a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, bias: Tensor | None, grad: bool, dtype: torch.dtype
) -> Tensor:
    """Codes a [m, k], with `grad` of e5m2, and b [n, k] -> a @ b.T + bias [m, n] in a dtype, of the numbers that the
    codes stand for.

    Devices sum forward products in the accumulators of their tensor cores, which have fewer bits, and those of
    gradients in float32, as torchao does. On the CPU the codes are decoded and multiplied in float32.
    """
    left, right = a.view(_DTYPES[grad]), b.view(_DTYPES[False]).t()
    if a.device.type != "cpu":
        return scaled_mm(left, right, a_scale, b_scale, bias=bias, out_dtype=dtype, use_fast_accum=not grad)
    out = left.to(torch.float32) @ right.to(torch.float32)
    out *= a_scale
    out *= b_scale
    return (out if bias is None else out.add_(bias)).to(dtype)


def _flops(given: Mapping[str, Any], result: Tensor) -> int:
    return 2 * result.numel() * int(given["a"].shape[1])


define(
    "fp8_scale(Tensor x, bool grad) -> Tensor",
    fp8_scale,
    lambda x, grad: x.new_empty((), dtype=torch.float32),
    traits=Traits(OnShard.REFUSED),
)
define(
    "fp8_codes(Tensor x, Tensor scale, bool grad) -> Tensor",
    fp8_codes,
    lambda x, scale, grad: x.new_empty(x.shape, dtype=torch.uint8),
    traits=Traits(OnShard.KEEPS),
)
define(
    "fp8_turned(Tensor x, Tensor? scale=None, bool grad=False) -> Tensor",
    fp8_turned,
    lambda x, scale=None, grad=False: _empty_turned(x),
    traits=Traits(OnShard.REFUSED),
)
define(
    "fp8_both(Tensor x, Tensor scale, bool grad) -> (Tensor, Tensor)",
    fp8_both,
    lambda x, scale, grad: (x.new_empty(x.shape, dtype=torch.uint8), _empty_turned(x)),
    traits=Traits(OnShard.REFUSED),
)
define(
    "fp8_mm(Tensor a, Tensor b, Tensor a_scale, Tensor b_scale, Tensor? bias, bool grad, ScalarType dtype) -> Tensor",
    fp8_mm,
    lambda a, b, a_scale, b_scale, bias, grad, dtype: a.new_empty(a.shape[0], b.shape[0], dtype=dtype),
    traits=Traits(OnShard.REFUSED, flops=_flops, multiplies=_DTYPES[False]),
)
