"""How a float32 number is kept in two halves: `zerofn::split`, `zerofn::join`, `zerofn::high`.

[Note: split master] An fp32 number is kept as its rounding to bfloat16, `hi`, and a signed 16-bit remainder `lo`:
`hi = (bits + 0x8000) >> 16`, `lo = bits - (hi << 16)`, so that `bits = (hi << 16) + lo` gives back every bit of every
number. `hi` is nearest, ties away from zero: of 2^17 numbers one is rounded otherwise than by torch's cast, which
sends ties to even. A NaN is kept as hi = 0x7FC0, lo = 0.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .library import define

_NAN = 0x7FC0  # bfloat16's quiet NaN
HALF, LOW = torch.bfloat16, torch.int16


def _rounded(p: Tensor) -> Tensor:
    """float32 -> the bits of its `hi`, as int16."""
    hi = torch.bitwise_right_shift(p.view(torch.int32) + 0x8000, 16).to(torch.int16)
    return hi.masked_fill_(p.isnan(), _NAN)


def high(p: Tensor) -> Tensor:
    """float32 -> bfloat16, nearest, ties away from zero: the `hi` of `split`."""
    return _rounded(p.contiguous()).view(HALF)


def split(p: Tensor) -> tuple[Tensor, Tensor]:
    """float32 -> (hi bfloat16, lo int16). See [Note: split master]."""
    p = p.contiguous()
    hi = _rounded(p)
    lo = (p.view(torch.int32) - torch.bitwise_left_shift(hi.to(torch.int32), 16)).to(LOW)
    return hi.view(HALF), lo.masked_fill_(p.isnan(), 0)


def join(hi: Tensor, lo: Tensor) -> Tensor:
    """(hi, lo) -> float32, every bit of what `split` was given."""
    return torch.bitwise_left_shift(hi.view(torch.int16).to(torch.int32), 16).add_(lo).view(torch.float32)


define("high(Tensor p) -> Tensor", high, lambda p: p.new_empty(p.shape, dtype=HALF))
define("split(Tensor p) -> (Tensor, Tensor)", split,
       lambda p: (p.new_empty(p.shape, dtype=HALF), p.new_empty(p.shape, dtype=LOW)))
define("join(Tensor hi, Tensor lo) -> Tensor", join, lambda hi, lo: hi.new_empty(hi.shape, dtype=torch.float32))
