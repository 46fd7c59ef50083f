"""The formats of `ops/csrc/formats.h` and `cpu.update_` in torch's operations: used without the library, and to check
it.

The results are the library's, bit for bit, on one thread and on x86 with AVX2, where its Adam is torch's fused one.
"""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from .kernel_args import BLOCK, RULES, UNIT, is_split, moment_format, num_blocks, rates_of

PIECE = 1 << 18  # elements at a time: they take 8 bytes each, many times over; whole blocks and units
_EVEN = 64  # elements: a run that is cut at a multiple of these is computed as the whole one, vector by vector
_ABS, _INF, _SMALLEST_SCALE = 0x7FFFFFFF, 0x7F800000, 0x10800000


def bits_of(x: Tensor) -> Tensor:
    """fp32 -> int64, its bits as an unsigned number."""
    return x.view(torch.int32).long() & 0xFFFFFFFF


def floats_of(bits: Tensor) -> Tensor:
    """int64 -> fp32 of these bits."""
    return _wrap(bits).view(torch.float32)


def _wrap(bits: Tensor) -> Tensor:
    """int64 -> int32 of the same low bits."""
    return (((bits + (1 << 31)) & 0xFFFFFFFF) - (1 << 31)).int()


def _short(bits: Tensor) -> Tensor:
    return (((bits + (1 << 15)) & 0xFFFF) - (1 << 15)).short()


def _pieces(*tensors: Tensor, scales: Sequence[Tensor] = ()) -> Iterator[tuple[Tensor, ...]]:
    """Contiguous tensors of one size, and scales of their blocks, a piece at a time."""
    found = [x.view(-1).split(PIECE) for x in tensors] + [x.split(PIECE // BLOCK) for x in scales]
    return zip(*found, strict=True)


def split(p: Tensor, out: Sequence[Tensor]) -> None:
    """fp32 -> bfloat16 and int16."""
    for x, hi, lo in _pieces(p, *out):
        bits, nan = bits_of(x), x.isnan()
        hi.view(torch.int16).copy_(_short(torch.where(nan, 0x7FC0, (bits + 0x8000) >> 16)))
        lo.copy_(_short(torch.where(nan, 0, bits)))


def sum_bf16(rows: Sequence[Tensor], out: Tensor) -> None:
    """The sum of bfloat16 rows, in order. In pieces, as torch casts an operand as a whole."""
    for total, *parts in zip(*(x.split(1 << 16) for x in (out, *rows)), strict=True):
        total.copy_(parts[0])
        for x in parts[1:]:
            total.add_(x)


def join(hi: Tensor, lo: Tensor, out: Tensor) -> None:
    """bfloat16 and int16 -> fp32."""
    for high, low, x in _pieces(hi, lo, out):
        x.copy_(floats_of((high.view(torch.int16).long() << 16) + low.long()))


def encode(x: Tensor, signed: bool, out: Sequence[Tensor], random: Tensor | int = 0x80000) -> None:
    """fp32 -> codes and scales; `random`: 20 bits an element, int64 of x's size."""
    if isinstance(random, int):
        for one, codes, scales in _pieces(x, out[0], scales=out[1:]):
            _encode(one, signed, (codes, scales), random)
    else:
        for one, codes, bits, scales in _pieces(x, out[0], random, scales=out[1:]):
            _encode(one, signed, (codes, scales), bits)


def _encode(x: Tensor, signed: bool, out: Sequence[Tensor], random: Tensor | int) -> None:
    bits = bits_of(x)
    step = torch.where(x.isnan(), 0x7FC, (bits & _ABS) + random >> 20)
    blocks = torch.nn.functional.pad(step, (0, num_blocks(x.numel()) * BLOCK - x.numel())).view(-1, BLOCK)
    largest = blocks.amax(1) << 20
    scales = ((largest + 0x7FFFFF) & _INF).clamp(min=_SMALLEST_SCALE)
    scales = torch.where(largest > 0x7F000000, torch.where(largest > _INF, 0x7FC00000, _INF), scales)
    top = 127 if signed else 255
    base = ((scales >> 20) - top).repeat_interleave(BLOCK)[: x.numel()]
    code = (step - base).clamp(min=0)
    if signed:
        code |= bits >> 24 & 0x80
    finite = (scales < _INF).repeat_interleave(BLOCK)[: x.numel()]
    out[0].copy_(torch.where(finite, code, top))
    out[1].copy_(floats_of(torch.where(largest > 0, scales, 0)))


def decode(codes: Tensor, scales: Tensor, signed: bool, out: Tensor) -> None:
    """Codes and scales -> fp32."""
    for code, x, scale in _pieces(codes, out, scales=[scales]):
        _decode(code, scale, signed, x)


def _decode(codes: Tensor, scales: Tensor, signed: bool, out: Tensor) -> None:
    code = codes.long()
    top = 127 if signed else 255
    base = bits_of(scales).clamp(min=_SMALLEST_SCALE) - (top << 20)
    size = (code & top) << 20
    bits = size + base.repeat_interleave(BLOCK)[: code.numel()]
    bits = torch.where(size > 0, bits, 0) if signed else bits
    out.copy_(floats_of(bits | (code & 0x80) << 24 if signed else bits))


def draws(key: int, offset: int, size: int, of: int) -> Tensor:
    """int64 [size]: 32 random bits for m (`of` 0) or v (1) of each element from `offset` on, a multiple of 2,048."""
    seeds = [_seed(key, offset // UNIT + i) for i in range(-(-size // UNIT))]
    return _from_places(key, [seed >> 21 if of else seed % UNIT for seed in seeds], UNIT).view(-1)[:size]


def draws_of_blocks(key: int, first: int, num: int, block: int) -> Tensor:
    """int64 [num, block]: 32 random bits for each element of blocks `first`, `first` + 1, ..."""
    return _from_places(key, [_seed(key, first + i) % UNIT for i in range(num)], block)


def _from_places(key: int, starts: Sequence[int], num: int) -> Tensor:
    places = (torch.tensor(starts)[:, None] + torch.arange(num)) % UNIT
    return _table(key)[places]


def _table(key: int) -> Tensor:
    """int64 [2048]: all draws of a key."""
    place = torch.arange(UNIT)
    x = (_seed(key, (1 << 64) - 1) + place * 0x9E3779B9) & 0xFFFFFFFF
    x = ((x ^ x >> 16) * 0x7FEB352D) & 0xFFFFFFFF
    for factor, shift in ((0x3A5, 6), (0x5CB, 5), (0x2E3, 11)):
        place = place * factor % UNIT
        place = place ^ place >> shift
    return place << 21 | (x ^ x >> 15) >> 11


def _seed(key: int, unit: int) -> int:
    x = key * 0x9E3779B97F4A7C15 + unit * 0xD1B54A32D192ED03 + 0x2545F4914F6CDD1D & (1 << 64) - 1
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & (1 << 64) - 1
    return ((x ^ x >> 27) * 0x94D049BB133111EB & (1 << 64) - 1) >> 32


def to_bf16(x: Tensor, random: Tensor) -> Tensor:
    """fp32 -> bfloat16, rounded up where `random` (16 bits, int64) says so."""
    return _short(bits_of(x) + random >> 16).view(torch.bfloat16)


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
    factors: Sequence[float],
    hyper: dict[str, Any],
    count: int,
    offset: int,
) -> None:
    """`cpu.update_`: decode, update in fp32, encode; a piece at a time, so that it takes little memory beside."""
    runs = list(zip(starts, stops, rates, decays, strict=True))
    for a, b in _windows(g.numel(), runs):
        if inside := [(max(x, a) - a, min(y, b) - a, *rates) for x, y, *rates in runs if x < b and a < y]:
            part = slice(a, b), slice(a // BLOCK, num_blocks(b))
            held = [[x.view(-1)[k] for x, k in zip(m, part, strict=False)] for m in moments]
            master = [x.view(-1)[a:b] for x in p]
            _update(rule, master, g.reshape(-1)[a:b], held, inside, factors, hyper, count, offset + a)


def _windows(size: int, runs: Sequence[tuple[int, int, float, float]]) -> list[tuple[int, int]]:
    """[0, size) in pieces, cut where that changes no run."""
    cuts = [
        at
        for at in range(PIECE, size, PIECE)
        if not any(start < at < stop and (at - start) % _EVEN for start, stop, *_ in runs)
    ]
    return list(itertools.pairwise([0, *cuts, size]))


def _update(
    rule: str,
    p: Sequence[Tensor],
    g: Tensor,
    moments: Sequence[Sequence[Tensor]],
    runs: Sequence[Any],
    factors: Sequence[float],
    hyper: dict[str, Any],
    count: int,
    offset: int,
) -> None:
    """`update_` of one piece. `runs`: (start, stop, rate, decay) of each."""
    size, known = g.numel(), RULES[rule]
    lossy = any(map(moment_format, moments))
    wide = _scaled(g.reshape(-1).float(), factors, lossy)
    decoded = [_master(p), *(_decoded(m, i == 0, size) for i, m in enumerate(moments))]
    for start, stop, rate, decay in runs:
        run = [x[start:stop] for x in decoded]
        if known.lossy and lossy:
            constants = rates_of(rule, rate, decay, hyper, count)
            known.lossy(*run, wide[start:stop], {k: torch.tensor(x, dtype=torch.float32) for k, x in constants.items()})
        else:
            one = [[0], [stop - start], [rate], [decay]]
            known.update(run, wide[start:stop], torch.tensor(count), None, None, None, *one, **hyper)
    touched = torch.zeros(num_blocks(size) * BLOCK, dtype=torch.bool)
    for start, stop, *_ in runs:
        touched[start:stop] = True
    blocks = touched.view(-1, BLOCK).any(1)
    for i, (m, x) in enumerate(zip(moments, decoded[1:], strict=True)):
        if lossy:  # others were changed where they lie
            _keep(m, x, i == 0, draws(count, offset, size, i), touched[:size], blocks)
    if is_split(p):
        new = torch.empty_like(p[0].view(-1)), torch.empty_like(p[1].view(-1))
        split(decoded[0], new)
        for old, fresh in zip(p, new, strict=True):
            old.view(-1)[touched[:size]] = fresh[touched[:size]]


def _scaled(g: Tensor, factors: Sequence[float], lossy: bool) -> Tensor:
    """Times each factor; beside lossy moments times their product, and a NaN becomes inf."""
    wide = [torch.tensor(factor, dtype=torch.float32) for factor in factors]
    if not lossy:
        for factor in wide:
            g = g * factor
        return g
    g = g * torch.stack([torch.tensor(1.0), *wide]).prod()
    return torch.where(g < torch.inf, g, torch.inf)


def _master(p: Sequence[Tensor]) -> Tensor:
    if not is_split(p):
        return p[0].view(-1)
    whole = torch.empty(p[0].numel())
    join(p[0].view(-1), p[1].view(-1), whole)
    return whole


def _decoded(moment: Sequence[Tensor], signed: bool, size: int) -> Tensor:
    if moment_format(moment) < 2:
        return moment[0].view(-1).float()
    x = torch.empty(size)
    decode(moment[0], moment[1], signed, x)
    return x


def _keep(moment: Sequence[Tensor], x: Tensor, signed: bool, random: Tensor, touched: Tensor, blocks: Tensor) -> None:
    """Write a lossy moment back: bf16 in the runs, 8-bit blocks where a run enters them."""
    if moment_format(moment) == 1:
        moment[0].view(-1)[touched] = to_bf16(x, random >> 16)[touched]
        return
    codes, scales = torch.empty(x.numel(), dtype=torch.uint8), torch.empty(num_blocks(x.numel()))
    encode(x, signed, (codes, scales), random >> 12)
    inside = blocks.repeat_interleave(BLOCK)[: x.numel()]
    moment[0].view(-1)[inside] = codes[inside]
    moment[1][blocks] = scales[blocks]


def fma(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """a * b + c in fp32, rounded once: in float64 to odd (Boldo and Melquiond 2008), then to fp32."""
    product, c = a.double() * b.double(), c.double().expand(a.shape if a.dim() else b.shape)
    total = product + c
    part = total - product
    error = (product - (total - part)) + (c - part)  # Knuth's two-sum: what `total` lost
    bits = total.contiguous().view(torch.int64)
    toward = torch.where((error > 0) == (total > 0), 1, -1)
    odd = torch.where((error != 0) & error.isfinite() & (bits & 1 == 0), bits + toward, bits)
    return odd.view(torch.float64).float()


def norm2_and_extreme(x: Tensor) -> tuple[float, float]:
    """(2-norm, largest magnitude)."""
    if not x.numel():
        return 0.0, 0.0
    norm = torch.linalg.vector_norm(x.reshape(-1), dtype=torch.float32)
    low, high = torch.aminmax(x)
    return norm.item(), torch.maximum(low.neg(), high).item()


def checksum(address: int, num_bytes: int) -> int:
    """The checksum of reductions.cpp."""
    stripes = -(-num_bytes // 256)
    words = torch.zeros(stripes * 64, dtype=torch.int32)
    ctypes.memmove(words.data_ptr(), address, num_bytes)
    place = (torch.arange(1, stripes + 1) * 0x9E3779B1) & 0xFFFFFFFF
    x = (words.long() & 0xFFFFFFFF).view(-1, 64) ^ place[:, None]
    x = ((x ^ x >> 16) * 0x7FEB352D) & 0xFFFFFFFF
    sums = (x ^ x >> 15).sum(0) & 0xFFFFFFFF
    whole = num_bytes
    for word in sums.tolist():
        whole = (whole ^ word) * 0x9E3779B97F4A7C15 & (1 << 64) - 1
        whole ^= whole >> 32
    return whole
