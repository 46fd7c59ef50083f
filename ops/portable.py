"""The formats of `ops/csrc/formats.h` and `native.update_` in torch's operations: without the library, and to check it.

Bit for bit the library's results, on one thread and on x86 with AVX2, where its Adam is torch's fused one.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .._torch_compat import fused_adam_, fused_adamw_
from .arguments import BLOCK, moment_format, num_blocks, rates_of

_ABS, _INF, _ONE = 0x7FFFFFFF, 0x7F800000, 0x3F800000
_SMALLEST_SCALE = 2.0**-94


def _bits(x: Tensor) -> Tensor:
    """fp32 -> int64, its bits as an unsigned number."""
    return x.view(torch.int32).long() & 0xFFFFFFFF


def _floats(bits: Tensor) -> Tensor:
    return _wrap(bits).view(torch.float32)


def _wrap(bits: Tensor) -> Tensor:
    """int64 -> int32 of the same low bits."""
    return (((bits + (1 << 31)) & 0xFFFFFFFF) - (1 << 31)).int()


def _short(bits: Tensor) -> Tensor:
    return (((bits + (1 << 15)) & 0xFFFF) - (1 << 15)).short()


def split(p: Tensor, out: Sequence[Tensor]) -> None:
    """fp32 -> bfloat16 and int16."""
    bits = _bits(p)
    nan = p.isnan()
    out[0].view(torch.int16).copy_(_short(torch.where(nan, 0x7FC0, (bits + 0x8000) >> 16)))
    out[1].copy_(_short(torch.where(nan, 0, bits)))


def join(hi: Tensor, lo: Tensor, out: Tensor) -> None:
    """bfloat16 and int16 -> fp32."""
    out.copy_(_floats((hi.view(torch.int16).long() << 16) + lo.long()))


def encode(x: Tensor, signed: bool, out: Sequence[Tensor], random: Tensor | int = 0x8000) -> None:
    """fp32 -> codes and scales; `random`: 16 bits an element, int64 of x's shape."""
    size = _bits(x).view(-1) & _ABS
    blocks = torch.nn.functional.pad(size, (0, num_blocks(x.numel()) * BLOCK - x.numel())).view(-1, BLOCK)
    largest = blocks.amax(1)
    scales = _floats(largest)
    usual = (largest > 0) & (largest < _INF)
    scales = torch.where(usual, scales.clamp(min=_SMALLEST_SCALE), scales)
    inverse = torch.where(usual, 1.0 / scales, 0.0)
    y = _bits(_floats(size) * inverse.repeat_interleave(BLOCK)[: x.numel()]).clamp(max=_ONE)
    base = _ONE - ((127 if signed else 255) << 20)
    code = (((y + 8) >> 4) - (base >> 4) + random) >> 16
    code = torch.maximum(code, torch.zeros_like(code) if signed else (size > 0).long())
    if signed:
        code |= _bits(x).view(-1) >> 24 & 0x80
    out[0].view(-1).copy_(code)
    out[1].copy_(scales)


def decode(codes: Tensor, scales: Tensor, signed: bool, out: Tensor) -> None:
    """Codes and scales -> fp32."""
    code = codes.view(-1).long()
    c = code & 0x7F if signed else code
    bits = torch.where(c > 0, _ONE - ((127 if signed else 255) << 20) + (c << 20), 0)
    if signed:
        bits |= (code & 0x80) << 24
    out.view(-1).copy_(_floats(bits) * scales.repeat_interleave(BLOCK)[: code.numel()])


def hash_of(key: int, offset: int, size: int) -> Tensor:
    """int64 [size]: 32 random bits for each of the elements from `offset` (a multiple of 256) on."""
    seeds = torch.tensor([_seed(key, offset // BLOCK + i) for i in range(num_blocks(size))])
    x = (seeds[:, None] + torch.arange(BLOCK) * 0x9E3779B9) & 0xFFFFFFFF
    x = ((x ^ x >> 16) * 0x7FEB352D) & 0xFFFFFFFF
    return (x ^ x >> 15).view(-1)[:size]


def _seed(key: int, block: int) -> int:
    x = key * 0x9E3779B97F4A7C15 + block * 0xD1B54A32D192ED03 + 0x2545F4914F6CDD1D & (1 << 64) - 1
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & (1 << 64) - 1
    return ((x ^ x >> 27) * 0x94D049BB133111EB & (1 << 64) - 1) >> 32


def to_bf16(x: Tensor, random: Tensor) -> Tensor:
    """fp32 -> bfloat16, rounded up where `random` (16 bits, int64) says so."""
    bits = _bits(x)
    up = torch.where(bits & _ABS >= 0x7F7F0000, 0x8000, random)
    return _short(torch.where(x.isnan(), 0x7FC0, (bits + up) >> 16)).view(torch.bfloat16)


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
    """`native.update_`: everything decoded, updated in fp32, encoded."""
    size = g.numel()
    wide = g.reshape(-1).float()
    for factor in factors:
        wide = wide * torch.tensor(factor, dtype=torch.float32)
    decoded = [_master(p), *(_decoded(m, i == 0, size) for i, m in enumerate(moments))]
    for start, stop, rate, decay in zip(starts, stops, rates, decays, strict=True):
        run = [x[start:stop] for x in decoded]
        _step(rule, run, wide[start:stop], rate, decay, hyper, count)
    random = hash_of(count, offset, size) if any(map(moment_format, moments)) else None
    touched = torch.zeros(num_blocks(size) * BLOCK, dtype=torch.bool)
    for start, stop in zip(starts, stops, strict=True):
        touched[start:stop] = True
    blocks = touched.view(-1, BLOCK).any(1)
    for i, (m, x) in enumerate(zip(moments, decoded[1:], strict=True)):
        bits = None if random is None else random >> 16 * i & 0xFFFF
        _keep(m, x, i == 0, bits, touched[:size], blocks)
    if len(p) == 2:
        new = torch.empty_like(p[0].view(-1)), torch.empty_like(p[1].view(-1))
        split(decoded[0], new)
        for old, fresh in zip(p, new, strict=True):
            old.view(-1)[touched[:size]] = fresh[touched[:size]]


def _master(p: Sequence[Tensor]) -> Tensor:
    if len(p) == 1:
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


def _keep(moment: Sequence[Tensor], x: Tensor, signed: bool, random: Tensor | None, touched: Tensor,
          blocks: Tensor) -> None:
    """Write a moment back, in its format; bf16 in the runs, 8-bit blocks where a run enters them."""
    if random is None or moment_format(moment) == 0:
        return  # it was changed where it lies
    if moment_format(moment) == 1:
        moment[0].view(-1)[touched] = to_bf16(x, random)[touched]
        return
    codes, scales = torch.empty(x.numel(), dtype=torch.uint8), torch.empty(num_blocks(x.numel()))
    encode(x, signed, (codes, scales), random)
    inside = blocks.repeat_interleave(BLOCK)[: x.numel()]
    moment[0].view(-1)[inside] = codes[inside]
    moment[1][blocks] = scales[blocks]


def _step(rule: str, run: list[Tensor], g: Tensor, rate: float, decay: float, hyper: dict[str, Any],
          count: int) -> None:
    """One run in fp32, in place."""
    r = rates_of(rule, rate, decay, hyper, count)
    p, *moments = run
    if rule in ("adamw", "adam"):
        fused = fused_adamw_ if rule == "adamw" else fused_adam_
        fused([p], [g], [moments[0]], [moments[1]], [], [torch.tensor(float(count))], lr=rate, beta1=hyper["b1"],
              beta2=hyper["b2"], weight_decay=decay, eps=hyper["eps"], amsgrad=False, maximize=False)
        return
    if rule == "lion":
        m = moments[0]
        direction = m.mul(r["b1"]).add_(g, alpha=r["c1"]).sign_()
        p.mul_(r["shrink"]).add_(direction, alpha=r["rate"])
        m.mul_(r["b2"]).add_(g, alpha=r["c2"])
        return
    direction = g.add(p, alpha=decay) if decay else g
    if rule == "sgd_momentum":
        m = moments[0].mul_(r["b1"]).add_(direction)
        direction = direction.add(m, alpha=r["b1"]) if r["nesterov"] else m
    p.add_(direction, alpha=r["rate"])


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
