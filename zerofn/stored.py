"""How a piece is kept: codecs between a public tensor and the tensors that hold it.

A step, an optimizer and a checkpoint see one tensor a piece, in the master's dtype. What lies in memory may be
something else: two halves, eight-bit blocks, a place on a disk. `compile` gives a step what lies in memory, decodes
at its start and encodes at its end, and the passes let update rules work on it as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .ops import formats as _formats  # noqa: F401  (defines zerofn::split and its like)
from .ops.formats import HALF, LOW

ops = torch.ops.zerofn


@dataclass(frozen=True)
class Plain:
    """One tensor of the public dtype."""

    suffixes: tuple[str, ...] = ("",)
    note = ""

    def parts(self, dtype: torch.dtype, size: int) -> list[tuple[torch.dtype, int]]:
        """(dtype, elements) of what holds `size` elements."""
        return [(dtype, size)]

    def decode(self, parts: Sequence[Tensor]) -> Tensor:
        """The public tensor."""
        return parts[0]

    def encode(self, x: Tensor) -> tuple[Tensor, ...]:
        """What holds `x`."""
        return (x,)


@dataclass(frozen=True)
class Split(Plain):
    """float32 as its bfloat16 rounding and an int16 remainder. See [Note: split master] in `ops.formats`."""

    suffixes: tuple[str, ...] = (".hi", ".lo")
    note = " in two halves"

    def parts(self, dtype: torch.dtype, size: int) -> list[tuple[torch.dtype, int]]:
        """2 + 2 bytes an element."""
        return [(HALF, size), (LOW, size)]

    def decode(self, parts: Sequence[Tensor]) -> Tensor:
        """Bit for bit what was encoded."""
        return ops.join(*parts)

    def encode(self, x: Tensor) -> tuple[Tensor, ...]:
        """(hi, lo)."""
        return tuple(ops.split(x))


PLAIN, SPLIT = Plain(), Split()


@dataclass(frozen=True)
class Kind:
    """What of a kept piece a captured step depends on: the codec, and the public dtype."""

    codec: Plain
    dtype: torch.dtype

    def lies_in(self, dtype: torch.dtype) -> bool:
        """Whether its first part is what is gathered and used in `dtype`, so that it may lie in the gathered copy."""
        return self.codec.parts(self.dtype, 0)[0][0] == dtype

    def keep(self, x: Tensor) -> Stored:
        """A public tensor as a piece of this kind."""
        return Stored(self, self.codec.encode(x))

    @property
    def num_parts(self) -> int:
        """How many tensors hold a piece."""
        return len(self.codec.suffixes)


@dataclass(frozen=True, eq=False)
class Stored:
    """A piece as it is kept."""

    kind: Kind
    parts: tuple[Tensor, ...]

    @property
    def dtype(self) -> torch.dtype:
        """The public dtype."""
        return self.kind.dtype

    @property
    def device(self) -> torch.device:
        """Where the first part lies: what a forward pass reads."""
        return self.parts[0].device

    @property
    def shape(self) -> torch.Size:
        """[size]."""
        return self.parts[0].shape

    @property
    def nbytes(self) -> int:
        """Bytes of all parts."""
        return sum(x.numel() * x.element_size() for x in self.parts)

    def decode(self) -> Tensor:
        """The public tensor [size]; memory of its own unless it is kept as it is."""
        return self.kind.codec.decode(self.parts)

    @property
    def note(self) -> str:
        """What to say of how it is kept, beside its dtype."""
        return self.kind.codec.note

    def read(self, start: int, stop: int) -> Tensor:
        """Elements [start, stop) of the public tensor."""
        return self.kind.codec.decode([x[start:stop] for x in self.parts])

    def fill(self, start: int, stop: int, read: Callable[[Tensor], Any]) -> None:
        """Let `read` fill elements [start, stop), given a public tensor of their size."""
        if self.kind.codec == PLAIN:
            read(self.parts[0][start:stop])
        else:
            values = torch.empty(stop - start, dtype=self.dtype, device=self.device)
            read(values)
            self.write(start, values)

    def write(self, start: int, values: Tensor) -> None:
        """Keep `values` [n] as elements [start, start + n)."""
        stop = start + values.numel()
        for part, fresh in zip(self.parts, self.kind.codec.encode(values.to(self.dtype)), strict=True):
            part[start:stop].copy_(fresh)


def stored(x: Tensor | Stored) -> Stored:
    """A tensor as a piece that is kept as it is."""
    return x if isinstance(x, Stored) else Stored(Kind(PLAIN, x.dtype), (x,))
