"""Units in blocks of 8 or 4 bits between ranks, each block with one scale.

A scale a block needs no word between ranks: it is in what a rank sends. One scale for a tensor would need the maxima of
all ranks before the first transfer.

Some of a unit travels as it is, such as norms and biases. Which blocks are coded is part of the codec's name,
"int8.256:0-4,6-9", since it depends on the unit alone. A row, which a rank sends, has the blocks that are not coded,
the codes of the others, and their scales; all rows of a transfer are as long as the longest. A transfer of a part of
the unit says at which element the part begins.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ..ops import wire_codes
from ..ops.wire_codes import Codes, Draws

_ALIGNED = 16  # bytes: every row begins at a multiple
Ranges = tuple[tuple[int, int], ...]


class _Part(NamedTuple):
    """Elements [start, stop) of a row's shard, whole blocks: where they lie in the row, as they are or as codes."""

    start: int
    stop: int
    held: Tensor | Codes


@dataclass(frozen=True)
class BlockWire:
    """float32, bfloat16 or float16 as `format`, in the blocks [a, b) of a unit that `coded` names, in order. `block`:
    elements of each.
    """

    format: str
    block: int
    coded: Ranges

    beside = True  # rows do not lie in the memory of what becomes of them

    def row_bytes(self, shard: int, itemsize: int, size: int, start: int = 0) -> int:
        """Return the bytes that a rank sends of its shard, of `shard` elements, to each of the others. `start`: the
        element of the unit at which the first rank's shard begins.
        """
        return _row_bytes(self, shard // self.block, itemsize, size, start // self.block)

    def rows_in(self, whole: Tensor, size: int, start: int = 0) -> Tensor:
        """Return memory for the rows of all ranks, beside what becomes of them."""
        length = self.row_bytes(whole.numel() // size, whole.itemsize, size, start)
        return torch.empty(size, length, dtype=torch.uint8, device=whole.device)

    def encode_row(self, shard: Tensor, rows: Tensor, rank: int, start: int = 0, key: int | None = None) -> None:
        """Encode a rank's shard [s] to its row: the nearest codes, or with a `key`, of 64 bits, those that it draws."""
        first = start + rank * shard.numel()
        for part in self._parts(rows[rank], shard.numel(), shard.dtype, first):
            elements = shard[part.start : part.stop]
            if isinstance(part.held, Codes):
                draws = None if key is None else Draws(key, (first + part.start) // self.block)
                wire_codes.encode(elements, part.held, draws)
            else:
                part.held.copy_(elements)

    def rows_of(self, whole: Tensor, size: int, rank: int, start: int = 0) -> Tensor:
        """Return memory for the rows of a flat tensor that has the shard of a rank, and encode that."""
        rows = self.rows_in(whole, size, start)
        self.encode_row(whole.view(size, -1)[rank], rows, rank, start)
        return rows

    def encode_all(self, rows: Tensor, start: int = 0, key: int | None = None) -> Tensor:
        """rows [size, s] -> each as it is sent [size, bytes]. `key`: see `encode_row`."""
        coded = self.rows_in(rows, len(rows), start)
        for rank, row in enumerate(rows):
            self.encode_row(row, coded, rank, start, key)
        return coded

    def decode_rows(self, whole: Tensor, rows: Tensor, start: int = 0) -> None:
        """Decode the rows of all ranks into the flat tensor."""
        for rank, (row, shard) in enumerate(zip(rows, whole.view(len(rows), -1), strict=True)):
            first = start + rank * shard.numel()
            for part in self._parts(row, shard.numel(), shard.dtype, first):
                elements = shard[part.start : part.stop]
                if isinstance(part.held, Codes):
                    wire_codes.decode(part.held, elements)
                else:
                    elements.copy_(part.held)

    def sum_(self, out: Tensor, rows: Sequence[Tensor], first: int = 0) -> None:
        """Write the sum of rows, of shards that begin at element `first` of the unit, to `out` [s], added in their
        order in float32.
        """
        total = out if out.dtype is torch.float32 else torch.empty(out.shape, device=out.device)
        parts = [self._parts(row, out.numel(), out.dtype, first) for row in rows]
        for each in zip(*parts, strict=True):
            elements, held = total[each[0].start : each[0].stop], [part.held for part in each]
            coded = [x for x in held if isinstance(x, Codes)]
            if coded:  # then all are
                wire_codes.sum_(coded, elements)
                continue
            elements.copy_(held[0])
            for x in held[1:]:
                elements.add_(x)
        if total is not out:
            out.copy_(total)

    def _parts(self, row: Tensor, size: int, dtype: torch.dtype, first: int) -> Iterator[_Part]:
        """Yield the parts of a row of `size` elements, which begin at element `first` of the unit."""
        at, num = first // self.block, size // self.block
        num_coded = _num_coded(self.coded, at, at + num)
        plain = row[: (num - num_coded) * self.block * dtype.itemsize].view(dtype)
        code_bytes = self.block * wire_codes.bits(self.format) // 8
        codes = row[plain.nbytes : plain.nbytes + num_coded * code_bytes]
        scales = row[plain.nbytes + codes.nbytes :][: 2 * num_coded].view(torch.bfloat16)
        coded = plain_blocks = 0
        for start, stop, is_coded in self._runs(at, at + num):
            count = stop - start
            held: Tensor | Codes
            if is_coded:
                here = codes[coded * code_bytes : (coded + count) * code_bytes]
                held = Codes(here, scales[coded : coded + count], self.format, self.block)
                coded += count
            else:
                held = plain[plain_blocks * self.block : (plain_blocks + count) * self.block]
                plain_blocks += count
            yield _Part((start - at) * self.block, (stop - at) * self.block, held)

    def rounded(self, x: Tensor, start: int = 0) -> Tensor:
        """Return elements of a unit [..., n], from `start` on, as they arrive after they were sent."""
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        for one, to in zip(x.reshape(-1, x.shape[-1]), out.view(-1, x.shape[-1]), strict=True):
            self.decode_rows(to, self.encode_all(one[None], start), start)
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


def _num_coded(coded: tuple[tuple[int, int], ...], first: int, last: int) -> int:
    return sum(max(0, min(b, last) - max(a, first)) for a, b in coded)


@functools.cache
def _row_bytes(how: BlockWire, blocks: int, itemsize: int, size: int, first: int) -> int:
    """The longest row of `size` ones, of `blocks` blocks each."""
    code_bytes, plain_bytes = how.block * wire_codes.bits(how.format) // 8 + 2, how.block * itemsize
    counts = (_num_coded(how.coded, first + rank * blocks, first + (rank + 1) * blocks) for rank in range(size))
    longest = max(num * code_bytes + (blocks - num) * plain_bytes for num in counts)
    return -(-longest // _ALIGNED) * _ALIGNED


def name_of(format: str, block: int, size: int, plain: Iterable[tuple[int, int]]) -> str:
    """Return the codec of a unit of `size` elements of which `plain`, elements [start, stop) in order, travel as they
    are: all blocks that have none of these are coded. "" where there is no such block.

    >>> name_of("fp8", 256, 2048, [(512, 800), (1000, 1010)])
    'fp8.256:0-2,4-8'
    """
    ends = [
        0,
        *(x for start, stop in plain if start < stop for x in (start // block, -(-stop // block))),
        size // block,
    ]
    text = ",".join(f"{a}-{b}" for a, b in zip(ends[::2], ends[1::2], strict=True) if a < b)
    return text and f"{format}.{block}:{text}"


@functools.cache
def block_wire(name: str) -> BlockWire:
    """Return the codec of a name that `name_of` has made."""
    how, _, where = name.partition(":")
    format, _, block = how.partition(".")
    ends = [x.split("-") for x in where.split(",")]
    return BlockWire(format, int(block), tuple((int(a), int(b)) for a, b in ends))
