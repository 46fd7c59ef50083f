"""float32 numbers in float8, 256 with one scale: `zerofn::fp8_encode` and `fp8_decode`.

[Note: float8 moments] The first moment is stored as e4m3 and the second as e5m2, the formats of Micikevicius et al.
2022 ("FP8 formats for deep learning", section 3), each block of 256 elements (Dettmers et al. 2022, section 2.1) with
one float32 scale, a power of two: the least that keeps the largest element inside the format.

Why these two. What Adam divides is m by the root of v, so the root of v must reach down as far as m does: an element
whose v is lost while its m is not would take a huge step. Below the largest of its block, e4m3 reaches to 2^-17.8 and
e5m2 to 2^-31.8, the root of which is 2^-15.9. v is stored as no less than e5m2's smallest number; so m over the root of
v is never more than about what it is at the largest elements. COAT (Xi et al. 2024, section 4) reaches the same ranges
with e4m3 alone, by a power of the values. Off by at most 1/16 (e4m3) and 1/8 (e5m2) of an element, in that range.

Update rules round stochastically: rounded to nearest, a second moment that decays by a thousandth a step never falls.
A scale is a power of two, so what was decoded encodes to the same numbers, however it is rounded.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .kernel_args import BLOCK, num_blocks
from .registry import OnShard, Traits, define


class _Float8(NamedTuple):
    dtype: torch.dtype
    largest: float
    least: int  # exponent of the smallest normal number
    mantissa: int  # bits


_FORMATS = {True: _Float8(torch.float8_e4m3fn, 448.0, -6, 3), False: _Float8(torch.float8_e5m2, 57344.0, -14, 2)}
_LEAST_SCALE = -100  # exponent: no product of a scale and a code is a denormal float32, which devices may flush


def fp8_encode(x: Tensor, signed: bool, random: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """float32 [any shape] -> (codes uint8 of its shape: the bits of float8; scales float32 [ceil(size / 256)]).

    `signed`: e4m3; else e5m2 for numbers that are not negative, of which none becomes zero unless its block is all
    zeros. Rounded to nearest, ties to even; with `random`, int64 of 32 bits an element, up or down as its upper 20 bits
    say, unbiased. What is not finite spoils its block.
    """
    form, size = _FORMATS[signed], x.numel()
    blocks = _padded(x.reshape(-1)).view(-1, BLOCK)
    top = blocks.abs().amax(1)
    fraction, exponent = torch.frexp(top / form.largest)
    # The least power of two with top <= largest * scale.
    scale = _power_of_two((exponent - (fraction == 0.5).int()).clamp(min=_LEAST_SCALE))
    usual = (top > 0) & (top < torch.inf)
    y = torch.where(top.isfinite()[:, None], blocks / torch.where(usual, scale, 1.0)[:, None], 1.0)
    y = y.clamp(-form.largest if signed else 2.0 ** (form.least - form.mantissa), form.largest)
    if random is not None:
        y = _rounded(y, _padded(random.reshape(-1)).view(-1, BLOCK), form)
    codes = y.to(form.dtype).view(torch.uint8).view(-1)[:size]
    return codes.view(x.shape), torch.where(usual, scale, top)


def _padded(x: Tensor) -> Tensor:
    return torch.nn.functional.pad(x, (0, -x.numel() % BLOCK))


def _power_of_two(exponent: Tensor) -> Tensor:
    """int32 -> float32, for normal numbers: exact, where `pow` need not be."""
    return ((exponent + 127) << 23).view(torch.float32)


def _rounded(y: Tensor, random: Tensor, form: _Float8) -> Tensor:
    """Numbers of the format, each the next one below or above in magnitude: above with the probability of its place
    between them."""
    exponent = torch.frexp(y).exponent - 1
    step = _power_of_two(exponent.clamp(min=form.least) - form.mantissa)
    chance = (random >> 12).to(torch.float32) * 2.0**-20
    return torch.copysign(((y.abs() / step + chance).floor() * step).clamp(max=form.largest), y)


def fp8_decode(codes: Tensor, scales: Tensor, signed: bool) -> Tensor:
    """What `fp8_encode` made -> float32 of the codes' shape."""
    x = codes.reshape(-1).view(_FORMATS[signed].dtype).to(torch.float32)
    whole = x.numel() // BLOCK * BLOCK
    x[:whole].view(-1, BLOCK).mul_(scales[: whole // BLOCK, None])
    if whole < x.numel():
        x[whole:].mul_(scales[-1])
    return x.view(codes.shape)


define(
    "fp8_encode(Tensor x, bool signed, Tensor? random=None) -> (Tensor, Tensor)",
    fp8_encode,
    lambda x, signed, random=None: (
        x.new_empty(x.shape, dtype=torch.uint8),
        x.new_empty(num_blocks(x.numel()), dtype=torch.float32),
    ),
    traits=Traits(OnShard.KEEPS),
)
define(
    "fp8_decode(Tensor codes, Tensor scales, bool signed) -> Tensor",
    fp8_decode,
    lambda codes, scales, signed: codes.new_empty(codes.shape, dtype=torch.float32),
    traits=Traits(OnShard.KEEPS),
)
