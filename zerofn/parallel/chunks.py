"""Which tokens of a sequence each rank has: chunks of equal size, dealt to ranks."""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass

import torch
from torch import Tensor

from ..sparse.part import Runs, runs_of
from ..util.arguments import known_fields


@known_fields
@dataclass(frozen=True)
class Chunks:
    """Which chunks of a row each rank has. All chunks have the same number of tokens, and are numbered in order.

    `of`: the indices of each rank's chunks, ascending, the same number for all ranks. `early_and_late` and `in_order`
    make the usual ones; `balanced_chunks` chooses by a layout of attention. Raises `ValueError` unless each chunk
    occurs exactly once.

    >>> Chunks(((0, 3), (1, 2))) == Chunks.early_and_late(2)
    True
    """

    of: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "of", tuple(map(tuple, self.of)))
        named = sorted(itertools.chain.from_iterable(self.of))
        if not named or named != list(range(len(named))) or len({len(mine) for mine in self.of}) != 1:
            raise ValueError(
                "Chunks: all ranks must have the same number of chunks, and together have each chunk from 0 on exactly "
                f"once, got {self.of}."
            )
        if any(sorted(mine) != list(mine) for mine in self.of):
            raise ValueError(f"Chunks: a rank's chunks must be in ascending order, got {self.of}.")

    @staticmethod
    def early_and_late(size: int) -> Chunks:
        """Rank r of `size` has the chunks r and 2 * size - 1 - r: under a causal mask all ranks have equal work."""
        return Chunks(tuple((r, 2 * size - 1 - r) for r in range(size)) if size > 1 else ((0,),))

    @staticmethod
    def in_order(size: int) -> Chunks:
        """One chunk for each of `size` ranks."""
        return Chunks(tuple((r,) for r in range(size)))

    @property
    def size(self) -> int:
        """The number of ranks."""
        return len(self.of)

    @property
    def num(self) -> int:
        """The number of chunks of all ranks together."""
        return sum(map(len, self.of))

    @property
    def each(self) -> int:
        """The number of chunks of each rank."""
        return len(self.of[0])

    @property
    def ranks(self) -> Tensor:
        """The rank of each chunk, int64 [chunks]."""
        found = torch.empty(self.num, dtype=torch.int64)
        for rank, mine in enumerate(self.of):
            found[list(mine)] = rank
        return found

    def runs(self, rank: int, length: int) -> Runs:
        """Return the positions of a rank's tokens, of `length` in a row."""
        tokens = length // self.num
        return tuple((tokens * first, tokens * end) for first, end in runs_of(self.of[rank]))

    def part(self, x: Tensor, rank: int, dim: int = -1) -> Tensor:
        """Return a rank's part of whole rows, whose tokens are along `dim`."""
        if self.size == 1:
            return x
        pieces = x.chunk(self.num, dim)
        return torch.cat([pieces[number] for number in self.of[rank]], dim)

    def parts(self, x: Tensor, dim: int) -> Tensor:
        """Return the parts of all ranks [ranks, ...] of whole rows, whose tokens are along `dim`."""
        pieces = x.chunk(self.num, dim)
        return torch.stack([torch.cat([pieces[number] for number in mine], dim) for mine in self.of])

    def whole(self, parts: Tensor, dim: int = -1) -> Tensor:
        """parts [ranks, ...] -> [...]: the chunks of all ranks in order, along `dim`, which counts from the last."""
        pieces = [part.chunk(self.each, dim) for part in parts.unbind(0)]
        at = {number: pieces[r][k] for r, mine in enumerate(self.of) for k, number in enumerate(mine)}
        return torch.cat([at[number] for number in range(self.num)], dim)


@functools.lru_cache(maxsize=64)
def chunks_for(size: int, chunks: Chunks | None, what: str) -> Chunks:
    """Return `chunks`, or an early and a late chunk for each of `size` ranks if `chunks` is None. `what`: for errors.

    Raises `ValueError` for chunks of another number of ranks.
    """
    if chunks is None:
        return Chunks.early_and_late(size)
    if chunks.size != size:
        raise ValueError(
            f"{what}: expected chunks for {size} ranks, which share a sequence, got chunks for {chunks.size}."
        )
    return chunks
