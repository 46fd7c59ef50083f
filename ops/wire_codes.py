"""What ranks send in 8, 4 or 1 bits: blocks of elements with one scale each. The formats are in `csrc/wire.h`.

On the CPU the library does it, on GPUs the kernels; where these are missing, torch's operations, with the same bits.
"""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import cpu, cuda, native, reference
from .kernel_args import GRADIENTS, check_tensor

FORMATS = ("int8", "int4", "fp8", "sign")  # zf_wire
_BITS = {"int8": 8, "int4": 4, "fp8": 8, "sign": 1}  # of an element's code
BLOCKS = (128, 256, 512, 1024, 2048)  # elements; shards start at multiples of the largest
_TOP = {"int8": 127.0, "int4": 7.0}
_LEAST, _TOP_SCALE = 2.0**-100, {"int8": 2.0**120, "int4": 2.0**124, "fp8": 2.0**119}  # scales
_AT_ONCE = 1 << 12  # blocks: torch's operations take some bytes an element beside
_MAGIC, _MAGIC_BITS = 12582912.0, 0x4B400000
_SUMS = 256  # by which the magnitudes of a block are added up
_MAGIC_FP8, _MAGIC_FP8_BITS = 24576.0, 0x46C00000


class Codes(NamedTuple):
    """A tensor as it is sent. `codes`: uint8, a byte an element; with "int4" half of one, with "sign" a bit. `scales`:
    bfloat16, one for each block of `block` elements.
    """

    codes: Tensor
    scales: Tensor
    format: str
    block: int

    @property
    def size(self) -> int:
        """The number of elements."""
        return self.scales.numel() * self.block

    def check(self, what: str, size: int, device: torch.device) -> None:
        """Raise `ValueError` or `TypeError` unless these can be the codes of this number of elements."""
        if self.format not in FORMATS or self.block not in BLOCKS or size % self.block:
            raise ValueError(
                f"{what}: {size} elements as {self.format!r} in blocks of {self.block}; formats are "
                f"{', '.join(FORMATS)}, and a block of {', '.join(map(str, BLOCKS))} elements divides them."
            )
        check_tensor(f"{what}: codes", self.codes, (torch.uint8,), size * bits(self.format) // 8, device)
        check_tensor(f"{what}: scales", self.scales, (torch.bfloat16,), size // self.block, device)


class Draws(NamedTuple):
    """Random bits for codes that are drawn: `key`, of 64 bits, and the number in their unit of the first block, so that
    codes do not depend on how a unit is cut.
    """

    key: int
    block: int


def bits(format: str) -> int:
    """Return the bits of an element's code."""
    return _BITS[format]


def encode(x: Tensor, out: Codes, draws: Draws | None = None) -> None:
    """fp32, bf16 or fp16 [size] -> its codes and scales, rounded to nearest, ties to even.

    With `draws`, and but for signs, each element becomes the code below or above it, with probabilities in 2^-15 (of
    normal numbers in fp8 2^-20) for which the mean of what arrives is the element.
    """
    check_tensor("wire encode: x", x, GRADIENTS, device=x.device)
    out.check("wire encode", x.numel(), x.device)
    if on_cpu(x):
        key = None if draws is None else ctypes.byref(ctypes.c_uint64(draws.key))
        more = (native.goes_far(out.codes), key, 0 if draws is None else draws.block)
        _in_blocks("wire_encode", x, out.codes, out.scales, of=out, number=x, more=more)
    elif on_gpu(x):
        how = (out.scales.numel(), out.block, FORMATS.index(out.format))
        drawn = (0, 0, 0) if draws is None else (1, _signed(draws.key), draws.block)
        cuda.launch("wire_encode", x.device, out.scales.numel(), x, _number(x), out.codes, out.scales, *how, *drawn)
    else:
        for at, elements, part in _windows(x, out):
            num = part.scales.numel()
            random = None if draws is None else reference.draws_of_blocks(draws.key, draws.block + at, num, out.block)
            _encode(elements, part, None if random is None else random.to(x.device))


def decode(given: Codes, out: Tensor) -> None:
    """What `encode` made -> fp32, bf16 or fp16 [size], the latter two rounded to nearest, ties to even."""
    check_tensor("wire decode: out", out, GRADIENTS, device=out.device)
    given.check("wire decode", out.numel(), out.device)
    if on_cpu(out):
        _in_blocks("wire_decode", given.codes, given.scales, out, of=given, number=out, more=[native.goes_far(out)])
    elif on_gpu(out):
        how = (_number(out), out.numel(), given.block, FORMATS.index(given.format))
        cuda.launch("wire_decode", out.device, _warps(out), given.codes, given.scales, out, *how)
    else:
        for _, elements, part in _windows(out, given):
            elements.copy_(_decoded(part))


def sum_(rows: Sequence[Codes], out: Tensor) -> None:
    """Write the sum of what ranks have sent, decoded and added in their order in fp32, to `out`, fp32 [size]."""
    check_tensor("wire sum: out", out, (torch.float32,), device=out.device)
    first = rows[0]
    for row in rows:
        row.check("wire sum", out.numel(), out.device)
    if on_cpu(out):
        addresses = [(ctypes.c_void_p * len(rows))(*[row[k].data_ptr() for row in _tensors(rows)]) for k in (0, 1)]
        function, format, far = native.kernel("wire_sum"), FORMATS.index(first.format), native.goes_far(out)

        def part(a: int, b: int) -> None:
            blocks = (a // first.block, b // first.block, first.block)
            function(*addresses, len(rows), out.data_ptr(), *blocks, format, far)

        native.in_parts(out.numel(), part, first.block)
    elif on_gpu(out) and (stride := _stride(rows)) is not None:
        how = (out.numel(), first.block, FORMATS.index(first.format))
        cuda.launch("wire_sum", out.device, _warps(out), first.codes, first.scales, stride, len(rows), out, *how)
    else:
        decode(first, out)
        for row in rows[1:]:
            now = torch.empty_like(out)
            decode(row, now)
            out.add_(now)


def _tensors(rows: Sequence[Codes]) -> list[tuple[Tensor, Tensor]]:
    return [(row.codes, row.scales) for row in rows]


def _stride(rows: Sequence[Codes]) -> int | None:
    """Return the bytes from each row's codes to the next one's, if they are as many for all, and for scales."""
    places = [[row[k].data_ptr() for row in _tensors(rows)] for k in (0, 1)]
    apart = {b - a for each in places for a, b in itertools.pairwise(each)}
    return next(iter(apart), 0) if len(apart) < 2 else None


def on_cpu(x: Tensor) -> bool:
    """Whether the library works on a tensor."""
    return x.device.type == "cpu" and cpu.missing() is None


def on_gpu(x: Tensor) -> bool:
    """Whether our kernels of a GPU work on a tensor."""
    return x.device.type == "cuda" and cuda.missing() is None


def _number(x: Tensor) -> int:
    return GRADIENTS.index(x.dtype)


def _signed(word: int) -> int:
    return (word + (1 << 63)) % (1 << 64) - (1 << 63)


def _warps(x: Tensor) -> int:
    return -(-x.numel() // 256)


def _in_blocks(name: str, *tensors: Tensor, of: Codes, number: Tensor, more: Sequence[Any] = ()) -> None:
    """Call the library's function on all blocks, on several threads."""
    function, how = native.kernel(name), (of.block, FORMATS.index(of.format), _number(number), *more)
    addresses = [x.data_ptr() for x in tensors]
    native.in_parts(of.size, lambda a, b: function(*addresses, a // of.block, b // of.block, *how), of.block)


# --- in torch's operations ---------------------------------------------------------------------


def _windows(x: Tensor, of: Codes) -> Iterator[tuple[int, Tensor, Codes]]:
    """Yield some blocks after the other of a tensor [size]: the number of the first, elements, codes."""
    num_bytes = of.block * bits(of.format) // 8
    for a in range(0, of.scales.numel(), _AT_ONCE):
        b = a + _AT_ONCE
        part = of._replace(codes=of.codes[a * num_bytes : b * num_bytes], scales=of.scales[a:b])
        yield a, x[a * of.block : b * of.block], part


def _encode(x: Tensor, out: Codes, random: Tensor | None) -> None:
    blocks = x.float().view(-1, out.block)
    if out.format == "sign":
        _encode_signs(blocks, out)
        return
    scale = _scale(blocks.abs().amax(1), out.format, random is not None)
    usual = (scale > 0) & scale.isfinite()
    y = blocks * torch.where(usual, 1.0 / scale, 0.0)[:, None]
    y = torch.where(scale.isfinite()[:, None], y, 0.0)
    _put_scales(scale, out)
    if out.format == "fp8":
        codes = y.to(torch.float8_e4m3fn).view(torch.uint8) if random is None else _drawn_fp8(y, random)
    else:
        y = y if random is None else y + _dither(random)
        codes = ((y + _MAGIC).view(torch.int32) - _MAGIC_BITS).to(torch.int8).view(torch.uint8)
    if out.format == "int4":
        low, high = (codes + 8).view(-1, 2, out.block // 2).unbind(1)
        codes = low | high << 4
    spoiled = scale.isnan().view(-1, *[1] * (codes.dim() - 1))
    out.codes.copy_(torch.where(spoiled, 0, codes).view(-1))


def _encode_signs(blocks: Tensor, out: Codes) -> None:
    scale = _mean(blocks.abs())
    _put_scales(scale, out)
    negative = (blocks < 0) & (scale > 0)[:, None]
    planes = negative.view(-1, 8, out.block // 8).to(torch.uint8)
    codes = planes[:, 0]
    for k in range(1, 8):
        codes = codes | planes[:, k] << k
    out.codes.copy_(codes.view(-1))


def _mean(sizes: Tensor) -> Tensor:
    """Magnitudes of blocks [blocks, block] -> the scales of signs, fp32 numbers that bfloat16 has."""
    block = sizes.shape[1]
    first, *others = sizes.split(_SUMS, 1)
    total = first
    for x in others:
        total = total + x
    while total.shape[1] > 1:
        half = total.shape[1] // 2
        total = total[:, :half] + total[:, half:]
    scale = _rounded(total[:, 0] / block)
    return torch.where(total[:, 0].isfinite(), scale, torch.nan)


def _rounded(scale: Tensor) -> Tensor:
    return torch.where(scale < _LEAST, 0.0, scale.bfloat16().float())


def _put_scales(scale: Tensor, out: Codes) -> None:
    out.scales.view(torch.int16).copy_(scale.view(torch.int32) >> 16)


def _dither(random: Tensor) -> Tensor:
    return ((random >> 17 << 8) + 0x3F800080).int().view(torch.float32) - 1.5


def _drawn_fp8(y: Tensor, random: Tensor) -> Tensor:
    size = y.abs()
    normal = (size.view(torch.int32) + (random >> 12).int() >> 20) - 960
    small = (size + _dither(random) * 2.0**-9 + _MAGIC_FP8).view(torch.int32) - _MAGIC_FP8_BITS
    codes = torch.where(size < 2.0**-6, small, normal)
    return (codes | y.signbit() * 0x80).to(torch.uint8)


def _scale(top: Tensor, format: str, drawn: bool) -> Tensor:
    """The largest magnitudes of blocks, fp32 -> their scales, fp32 numbers that bfloat16 has. `drawn`: rounded up."""
    if format == "fp8":
        octaves = 8 << 23
        power = ((top.view(torch.int32) + 0x1FFFFF) & 0x7F800000).clamp(min=(27 << 23) + octaves) - octaves
        scale = torch.where(top > 0, power.view(torch.float32), 0.0)
    else:
        scale = top / _TOP[format]
        scale = _raised(scale, top, _TOP[format]) if drawn else _rounded(scale)
    return torch.where(top.isfinite() & (scale <= _TOP_SCALE[format]), scale, torch.nan)


def _raised(scale: Tensor, top: Tensor, most: float) -> Tensor:
    """Quotients of `top` and `most` -> the least bfloat16 numbers that are no less; of NaN and inf some numbers."""
    raised = (scale.view(torch.int32).clamp(max=0x7F000000) + 0xFFFF & ~0xFFFF).view(torch.float32)
    more = (raised.view(torch.int32) + 0x10000).view(torch.float32)
    return torch.where(scale < _LEAST, 0.0, torch.where(raised * most < top, more, raised))


def _decoded(given: Codes) -> Tensor:
    codes = given.codes
    if given.format == "fp8":
        values = codes.view(torch.float8_e4m3fn).float()
    elif given.format == "int8":
        values = codes.view(torch.int8).float()
    elif given.format == "sign":
        planes = torch.arange(8, dtype=torch.uint8, device=codes.device).view(1, 8, 1)
        values = 1.0 - 2.0 * (codes.view(-1, 1, given.block // 8) >> planes & 1).float()
    else:
        halves = codes.view(-1, given.block // 2)
        values = torch.stack([halves & 15, halves >> 4], 1).float().sub_(8.0)
    return (values.view(-1, given.block) * given.scales.float()[:, None]).view(-1)
