"""Weights as float8 between ranks: e4m3 in blocks of 256, each with one scale.

A scale a block needs no word between ranks: it is in what a rank sends, as one byte, the exponent of a power of two.
One scale for a tensor would need the maxima of all ranks before the first gather.

Only weights of linear layers are sent so. What else is in a unit (norms, biases, a head) travels as it is: which blocks
are coded is part of the codec's name, "fp8:0-4,6-9", since it depends on the unit alone. A row, which a rank sends, has
the blocks that are not coded, the codes of the others, and their exponents; all rows are as long as the longest.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ..ops.fp8 import fp8_encode
from ..ops.kernel_args import BLOCK

FP8 = "fp8:"
_AT_ONCE = 1 << 12  # blocks that are encoded at once: rounding takes some bytes an element
_ALIGNED = 16  # bytes: every row begins at a multiple
_EXPONENT = 23  # where a float32 has it


@dataclass(frozen=True)
class Fp8Wire:
    """bfloat16 as float8, in the blocks [a, b) of a unit that `coded` names, in order."""

    coded: tuple[tuple[int, int], ...]

    def row_bytes(self, shard: int, size: int) -> int:
        """Return the bytes that a rank sends of its shard, of so many elements, to each of the others."""
        return _row_bytes(self.coded, shard // BLOCK, size)

    def rows_in(self, whole: Tensor, size: int) -> Tensor:
        """Return memory for the rows of all ranks, beside the flat unit that becomes of them."""
        length = self.row_bytes(len(whole) // size, size)
        return torch.empty(size, length, dtype=torch.uint8, device=whole.device)

    def encode_row(self, shard: Tensor, rows: Tensor, rank: int) -> None:
        """Encode a rank's shard [s] to its row."""
        for part, plain, codes, exponents in self._parts(shard.view(-1, BLOCK), rows[rank], rank):
            if plain is None:
                _encode(part, codes, exponents)
            else:
                plain.copy_(part)

    def decode_rows(self, whole: Tensor, rows: Tensor) -> None:
        """Decode the rows of all ranks into the flat unit."""
        for rank, (row, blocks) in enumerate(zip(rows, whole.view(len(rows), -1, BLOCK), strict=True)):
            for part, plain, codes, exponents in self._parts(blocks, row, rank):
                if plain is None:
                    _decode(codes, exponents, part)
                else:
                    part.copy_(plain)

    def _parts(self, blocks: Tensor, row: Tensor, rank: int) -> Iterator[tuple[Tensor, Tensor | None, Tensor, Tensor]]:
        """Yield the parts of a rank's shard [blocks, 256]: (it, its place in the row if it is not coded, the places of
        its codes and exponents).
        """
        first = rank * len(blocks)
        num_coded = _num_coded(self.coded, first, first + len(blocks))
        plain = row[: (len(blocks) - num_coded) * blocks[0].nbytes].view(blocks.dtype).view(-1, BLOCK)
        codes = row[plain.nbytes : plain.nbytes + num_coded * BLOCK].view(-1, BLOCK)
        exponents, k, at = row[plain.nbytes + codes.nbytes :], 0, 0
        for start, stop, is_coded in self._runs(first, first + len(blocks)):
            part, count = blocks[start - first : stop - first], stop - start
            if is_coded:
                yield part, None, codes[k : k + count], exponents[k : k + count]
                k += count
            else:
                yield part, plain[at : at + count], codes, exponents
                at += count

    def rounded(self, x: Tensor, start: int) -> Tensor:
        """Return elements of a unit, from `start` on, as they arrive after they were sent."""
        out = x.clone(memory_format=torch.contiguous_format)
        blocks, first = out.view(-1, BLOCK), start // BLOCK
        for a, b, is_coded in self._runs(first, first + len(blocks)):
            if is_coded:
                part = blocks[a - first : b - first]
                codes, exponents = (
                    part.new_empty(part.shape, dtype=torch.uint8),
                    part.new_empty(b - a, dtype=torch.uint8),
                )
                _encode(part, codes, exponents)
                _decode(codes, exponents, part)
        return out

    def _runs(self, first: int, last: int) -> Iterator[tuple[int, int, bool]]:
        """Cut the blocks [first, last) where coded ones begin and end: (start, stop, whether they are)."""
        at = first
        for a, b in self.coded:
            a, b = max(a, first), min(b, last)
            if a < b:
                if at < a:
                    yield at, a, False
                yield a, b, True
                at = b
        if at < last:
            yield at, last, False


def _encode(blocks: Tensor, codes: Tensor, exponents: Tensor) -> None:
    for k in range(0, len(blocks), _AT_ONCE):
        found, scales = fp8_encode(blocks[k : k + _AT_ONCE].to(torch.float32), True)
        codes[k : k + _AT_ONCE].copy_(found)
        exponents[k : k + _AT_ONCE].copy_(scales.view(torch.int32) >> _EXPONENT)


def _decode(codes: Tensor, exponents: Tensor, out: Tensor) -> None:
    """Exact: a float8 times a power of two is a bfloat16."""
    scales = (exponents.to(torch.int32) << _EXPONENT).view(torch.float32).to(out.dtype)
    torch.mul(codes.view(torch.float8_e4m3fn).to(out.dtype), scales[:, None], out=out)


def _num_coded(coded: tuple[tuple[int, int], ...], first: int, last: int) -> int:
    return sum(max(0, min(b, last) - max(a, first)) for a, b in coded)


@functools.cache
def _row_bytes(coded: tuple[tuple[int, int], ...], blocks: int, size: int) -> int:
    counts = (_num_coded(coded, rank * blocks, (rank + 1) * blocks) for rank in range(size))
    longest = max(num * (BLOCK + 1) + (blocks - num) * BLOCK * torch.bfloat16.itemsize for num in counts)
    return -(-longest // _ALIGNED) * _ALIGNED


def name_of(leaves: Iterable[tuple[int, int]]) -> str:
    """Return the codec of a unit whose elements [start, stop) of `leaves` are sent as float8: those of whole blocks. ""
    where that is none.

    >>> name_of([(0, 512), (512, 800), (1000, 2048)])
    'fp8:0-3,4-8'
    """
    runs: list[tuple[int, int]] = []
    for start, stop in leaves:
        runs.append((runs.pop()[0] if runs and runs[-1][1] == start else start, stop))
    blocks = ((-(-start // BLOCK), stop // BLOCK) for start, stop in runs)
    text = ",".join(f"{a}-{b}" for a, b in blocks if a < b)
    return text and FP8 + text


@functools.cache
def fp8_wire(name: str) -> Fp8Wire:
    """Return the codec of a name that `name_of` has made."""
    ends = [x.split("-") for x in name.removeprefix(FP8).split(",")]
    return Fp8Wire(tuple((int(a), int(b)) for a, b in ends))
