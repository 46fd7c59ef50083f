"""Wire codecs: in which form numbers travel between ranks.

A transfer names its codec; "" is none. Its start encodes and sends, its wait decodes. So for every pass a coded
transfer is what an uncoded one is: one start, one wait, the same tensors. Only the bytes that are sent, and the buffers
that a start makes, are others.

A codec is "bf16", for float32, or a name of `block_wire`. To add one, add its methods. What float32 becomes must encode
to the same numbers again: ranks send on what they have received.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..ops import cpu
from ..ops.registry import OnShard, Traits, define
from .block_wire import BlockWire, block_wire

SMALL = 4096  # elements that are encoded or decoded in place through a copy


@dataclass(frozen=True)
class WireCodec:
    """float32 as another dtype, rounded to nearest, ties to even. `dtype`: at most half as wide."""

    dtype: torch.dtype

    beside = False  # rows lie in the memory of what becomes of them

    def encode(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """Return the elements as they are sent, in `out` or in new memory."""
        out = torch.empty(x.shape, dtype=self.dtype, device=x.device) if out is None else out
        if _has_kernels(x, out):
            cpu.to_bf16(x, out)
            return out
        return out.copy_(x)

    def place_in(self, whole: Tensor) -> Tensor:
        """Return the part of the memory of a flat float32 tensor in which as many encoded elements are received, for
        `decode_`: its end.
        """
        coded = whole.view(self.dtype)
        return coded[len(coded) - len(whole) :]

    def encode_(self, whole: Tensor, start: int, stop: int) -> Tensor:
        """Encode elements [start, stop) of a flat float32 tensor to their places in `place_in(whole)`; return them.

        From the end on, each time as much as can be written without reaching what is not yet read.
        """
        coded, size, end = self.place_in(whole), len(whole), stop
        while end > start:
            begin = max(start, min(2 * end - size, end - SMALL))
            part = whole[begin:end]
            self.encode(part if begin >= 2 * end - size else part.clone(), coded[begin:end])
            end = begin
        return coded[start:stop]

    def decode_(self, whole: Tensor) -> None:
        """Decode what lies in `place_in(whole)`, into `whole`.

        From the start on, each time as much as can be written without reaching what is not yet read: half of the rest.
        """
        coded, start, size = self.place_in(whole), 0, len(whole)
        while size - start > SMALL:
            stop = (start + size) // 2
            self.sum_(whole[start:stop], [coded[start:stop]])
            start = stop
        whole[start:].copy_(coded[start:].clone())

    def row_bytes(self, shard: int, itemsize: int, size: int, start: int = 0) -> int:
        """Return the bytes that a rank sends of its shard, of this number of elements, to each of the others."""
        return shard * self.dtype.itemsize

    def rows_in(self, whole: Tensor, size: int, start: int = 0) -> Tensor:
        """Return memory for the encoded shards of all ranks, in that of the flat tensor that becomes of them."""
        return self.place_in(whole).view(size, -1)

    def encode_row(self, shard: Tensor, rows: Tensor, rank: int, start: int = 0) -> None:
        """Encode a rank's shard to its row."""
        self.encode(shard, rows[rank])

    def rows_of(self, whole: Tensor, size: int, rank: int, start: int = 0) -> Tensor:
        """Return such rows of a flat tensor that has the shard of a rank, and encode that."""
        shard = whole.numel() // size
        self.encode_(whole, rank * shard, (rank + 1) * shard)
        return self.rows_in(whole, size)

    def encode_all(self, rows: Tensor, start: int = 0, key: int | None = None) -> Tensor:
        """rows [size, s] -> each as it is sent [size, ...]. There are no numbers that a `key` draws."""
        return self.encode(rows)

    def decode_rows(self, whole: Tensor, rows: Tensor, start: int = 0) -> None:
        """Decode the rows of all ranks into the flat tensor."""
        self.decode_(whole)

    def rounded(self, x: Tensor, start: int = 0) -> Tensor:
        """Return a tensor as it arrives after it was sent."""
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        self.encode(x.reshape(-1), self.place_in(out.view(-1)))
        self.decode_(out.view(-1))
        return out

    def sum_(self, out: Tensor, rows: Sequence[Tensor], first: int = 0) -> None:
        """Write the sum of encoded rows, added in their order, to a float32 tensor."""
        if _has_kernels(out, rows[0]):
            cpu.sum_bf16(rows, out)
            return
        out.copy_(rows[0])
        for row in rows[1:]:
            out.add_(row)


def _has_kernels(x: Tensor, coded: Tensor) -> bool:
    """Return whether the CPU's kernels convert between a tensor and its encoded form."""
    known = x.device.type == "cpu" and x.dtype is torch.float32 and coded.dtype is torch.bfloat16
    return known and x.is_contiguous() and coded.is_contiguous()


CODECS = {"bf16": WireCodec(torch.bfloat16)}


def codec_named(name: str) -> WireCodec | BlockWire:
    """Return a codec: one of `CODECS`, or that of a unit in blocks."""
    return CODECS[name] if name in CODECS else block_wire(name)


def row_bytes(elements: int, itemsize: int, codec: str, size: int = 1, start: int = 0) -> int:
    """Return the bytes of a shard as it is sent: one of `size`, the first of which begins at element `start` of its
    unit.
    """
    return codec_named(codec).row_bytes(elements, itemsize, size, start) if codec else elements * itemsize


def nbytes_on_wire(x: Tensor, codec: str, size: int = 1, start: int = 0) -> int:
    """Return the bytes of a shard as it is sent; see `row_bytes`."""
    return row_bytes(x.numel(), x.itemsize, codec, size, start)


def rounded(x: Tensor, codec: str, start: int = 0) -> Tensor:
    """float32 or bfloat16 -> itself, as it arrives after it was sent: for what is on every rank already. `start`: from
    which element of the unit on these are.
    """
    return codec_named(codec).rounded(x, start) if codec and x.numel() else x.clone()


define(
    "rounded(Tensor x, str codec, int start=0) -> Tensor",
    rounded,
    lambda x, codec, start=0: torch.empty(x.shape, dtype=x.dtype, device=x.device),
    traits=Traits(OnShard.KEEPS, casts=True),
)
