"""Wire codecs: in which form float32 travels between ranks. Each is declared here, once.

A transfer names its codec; "" is none. Its start encodes and sends, its wait decodes. So for every pass a coded
transfer is what an uncoded one is: one start, one wait, the same tensors. Only the bytes that are sent, and the buffers
that a start makes, are others.

To add a codec, declare it in `CODECS`. Encoding a decoded tensor must give the same numbers again: ranks send on what
they have received.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..ops import cpu
from ..ops.registry import OnShard, Traits, define
from .float8_wire import FP8, Fp8Wire, fp8_wire

SMALL = 4096  # elements that are encoded or decoded in place through a copy


@dataclass(frozen=True)
class WireCodec:
    """float32 as another dtype, rounded to nearest, ties to even. `dtype`: at most half as wide."""

    dtype: torch.dtype

    def encode(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """Return the elements as they are sent, in `out` or in new memory."""
        return (torch.empty(x.shape, dtype=self.dtype, device=x.device) if out is None else out).copy_(x)

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
            coded[begin:end].copy_(part if begin >= 2 * end - size else part.clone())
            end = begin
        return coded[start:stop]

    def decode_(self, whole: Tensor) -> None:
        """Decode what lies in `place_in(whole)`, into `whole`.

        From the start on, each time as much as can be written without reaching what is not yet read: half of the rest.
        """
        coded, start, size = self.place_in(whole), 0, len(whole)
        while size - start > SMALL:
            stop = (start + size) // 2
            whole[start:stop].copy_(coded[start:stop])
            start = stop
        whole[start:].copy_(coded[start:].clone())

    def row_bytes(self, shard: int, size: int) -> int:
        """Return the bytes that a rank sends of its shard, of so many elements, to each of the others."""
        return self.nbytes(shard)

    def rows_in(self, whole: Tensor, size: int) -> Tensor:
        """Return memory for the encoded shards of all ranks, in that of the flat tensor that becomes of them."""
        return self.place_in(whole).view(size, -1)

    def encode_row(self, shard: Tensor, rows: Tensor, rank: int) -> None:
        """Encode a rank's shard to its row."""
        self.encode(shard, rows[rank])

    def decode_rows(self, whole: Tensor, rows: Tensor) -> None:
        """Decode the rows of all ranks into the flat tensor."""
        self.decode_(whole)

    def rounded(self, x: Tensor, start: int) -> Tensor:
        """Return a tensor as it arrives after it was sent."""
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        self.encode(x.reshape(-1), self.place_in(out.view(-1)))
        self.decode_(out.view(-1))
        return out

    def sum_(self, out: Tensor, rows: Sequence[Tensor]) -> None:
        """Write the sum of encoded rows, added in their order, to a float32 tensor."""
        if out.device.type == "cpu" and self.dtype is torch.bfloat16:
            cpu.sum_bf16(rows, out)
            return
        out.copy_(rows[0])
        for row in rows[1:]:
            out.add_(row)

    def nbytes(self, size: int) -> int:
        """Return the bytes of `size` encoded elements."""
        return size * self.dtype.itemsize


CODECS = {"bf16": WireCodec(torch.bfloat16)}


def codec_named(name: str) -> WireCodec | Fp8Wire:
    """Return a codec: one of `CODECS`, or that of a unit with weights in float8."""
    return fp8_wire(name) if name.startswith(FP8) else CODECS[name]


def nbytes_on_wire(x: Tensor, codec: str, size: int = 1) -> int:
    """Return the bytes of a shard as it is sent, one of `size`; or of what is summed, in any number of parts."""
    return codec_named(codec).row_bytes(x.numel(), size) if codec else x.nbytes


def rounded(x: Tensor, codec: str, start: int = 0) -> Tensor:
    """float32 or bfloat16 -> itself, as it arrives after it was sent: for what is on every rank already. `start`: from
    which element of the unit on these are.
    """
    return codec_named(codec).rounded(x, start)


define(
    "rounded(Tensor x, str codec, int start=0) -> Tensor",
    rounded,
    lambda x, codec, start=0: torch.empty(x.shape, dtype=x.dtype, device=x.device),
    traits=Traits(OnShard.KEEPS, casts=True),
)
