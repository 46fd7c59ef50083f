"""How float32 numbers are kept otherwise: `zerofn::split`, `join` and `high`; `zerofn::encode` and `decode`.

[Note: split master] An fp32 number is kept as its rounding to bfloat16, `hi`, and a signed 16-bit remainder `lo`:
`hi = (bits + 0x8000) >> 16`, `lo = bits - (hi << 16)`, so that `bits = (hi << 16) + lo` gives back every bit of every
number. `hi` is nearest, ties away from zero: of 2^17 numbers one is rounded otherwise than by torch's cast, which
sends ties to even. A NaN is kept as hi = 0x7FC0, lo = 0.

8-bit blocks are described in `csrc/formats.h`.
"""

from __future__ import annotations

from types import ModuleType

import torch
from torch import Tensor

from . import cpu, cuda
from .kernel_args import BLOCK as BLOCK
from .registry import OnShard, Traits, define

_NAN = 0x7FC0  # bfloat16's quiet NaN
HALF, LOW = torch.bfloat16, torch.int16


def _rounded(p: Tensor) -> Tensor:
    """float32 -> the bits of its `hi`, as int16."""
    hi = torch.bitwise_right_shift(p.view(torch.int32) + 0x8000, 16).to(torch.int16)
    return hi.masked_fill_(p.isnan(), _NAN)


def kernels(x: Tensor) -> ModuleType | None:
    """`cpu` or `cuda`, whichever serves the tensor's device; None where torch's operations have to."""
    if x.device.type == "cpu":
        return cpu
    return cuda if x.device.type == "cuda" and not cuda.missing() else None


def high(p: Tensor) -> Tensor:
    """float32 -> bfloat16, nearest, ties away from zero: the `hi` of `split`."""
    if kernels(p) is cuda:
        return cuda.high(p.contiguous())
    return _rounded(p.contiguous()).view(HALF)


def split(p: Tensor) -> tuple[Tensor, Tensor]:
    """float32 -> (hi bfloat16, lo int16). See [Note: split master]."""
    p = p.contiguous()
    if served := kernels(p):
        return served.split(p)
    hi = _rounded(p)
    lo = (p.view(torch.int32) - torch.bitwise_left_shift(hi.to(torch.int32), 16)).to(LOW)
    return hi.view(HALF), lo.masked_fill_(p.isnan(), 0)


def join(hi: Tensor, lo: Tensor) -> Tensor:
    """(hi, lo) -> float32, every bit of what `split` was given."""
    if served := kernels(hi):
        return served.join(hi.contiguous(), lo.contiguous())
    return torch.bitwise_left_shift(hi.view(torch.int16).to(torch.int32), 16).add_(lo).view(torch.float32)


def encode(x: Tensor, signed: bool) -> tuple[Tensor, Tensor]:
    """float32 [size] -> (codes uint8 [size], scales float32 [ceil(size / 256)]), rounded to nearest."""
    if served := kernels(x):
        return served.encode(x.contiguous(), signed)
    codes, scales = cpu.encode(x.contiguous().cpu(), signed)
    return codes.to(x.device), scales.to(x.device)


def decode(codes: Tensor, scales: Tensor, signed: bool) -> Tensor:
    """What `encode` made -> float32 [size]."""
    if served := kernels(codes):
        return served.decode(codes.contiguous(), scales.contiguous(), signed)
    return cpu.decode(codes.contiguous().cpu(), scales.contiguous().cpu(), signed).to(codes.device)


define(
    "encode(Tensor x, bool signed) -> (Tensor, Tensor)",
    encode,
    lambda x, signed: (x.new_empty(x.shape, dtype=torch.uint8), x.new_empty(-(-x.numel() // BLOCK))),
    traits=Traits(OnShard.KEEPS),
)
define(
    "decode(Tensor codes, Tensor scales, bool signed) -> Tensor",
    decode,
    lambda codes, scales, signed: codes.new_empty(codes.shape, dtype=torch.float32),
    traits=Traits(OnShard.KEEPS),
)
define(
    "high(Tensor p) -> Tensor",
    high,
    lambda p: p.new_empty(p.shape, dtype=HALF),
    traits=Traits(OnShard.KEEPS, casts=True),
)
define(
    "split(Tensor p) -> (Tensor, Tensor)",
    split,
    lambda p: (p.new_empty(p.shape, dtype=HALF), p.new_empty(p.shape, dtype=LOW)),
    traits=Traits(OnShard.KEEPS),
)
define(
    "join(Tensor hi, Tensor lo) -> Tensor",
    join,
    lambda hi, lo: hi.new_empty(hi.shape, dtype=torch.float32),
    traits=Traits(OnShard.KEEPS),
)
