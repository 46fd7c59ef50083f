"""A part of a whole attention: some of its heads, queries and keys, which have their places in the whole."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from .._torch_compat import plain_dispatch
from .outside import Reads
from .patterns import Pattern, Sizes, Tiles

Runs = tuple[tuple[int, int], ...]  # of places in ascending order: the first one, and the one behind the last


class Part(NamedTuple):
    """`sizes`: of the whole. `first_head`: the number there of the part's first head. `queries`, `keys`: their places
    there, all ascending.
    """

    sizes: Sizes
    first_head: int
    queries: Runs
    keys: Runs


@dataclass(frozen=True)
class OfPart(Pattern):
    """What a pattern of the whole allows in a part."""

    pattern: Pattern
    part: Part

    @property
    def tile(self) -> int:  # type: ignore[override]
        """The whole's."""
        return self.pattern.tile

    def facts(self) -> Reads:
        """Those of the pattern."""
        return self.pattern.facts()

    def allowed(self, head: Tensor, query: Tensor, key: Tensor, sizes: Sizes) -> Tensor:
        """By the places in the whole."""
        query, key = places(self.part.queries)[query], places(self.part.keys)[key]
        return self.pattern.allowed(head + self.part.first_head, query, key, self.part.sizes)

    def status(self, tiles: Tiles, sizes: Sizes) -> Tensor:
        """That of the tile of the whole from the first place to the last: what is so of all of it is so of a part."""
        queries, keys = places(self.part.queries), places(self.part.keys)
        around = Tiles(queries[tiles.q0], queries[tiles.q1], keys[tiles.k0], keys[tiles.k1])
        found, first = self.pattern.status(around, self.part.sizes), self.part.first_head
        return found if len(found) == 1 else found[first : first + sizes.heads]


@functools.lru_cache(maxsize=64)
def places(runs: Runs) -> Tensor:
    """Return all places of runs, int64 [places]."""
    with plain_dispatch():
        return torch.cat([torch.arange(*run) for run in runs])


def runs_of(found: Iterable[int]) -> Runs:
    """Return the runs of ascending places.

    >>> runs_of([0, 1, 2, 7, 9, 10])
    ((0, 3), (7, 8), (9, 11))
    """
    runs: list[tuple[int, int]] = []
    for place in found:
        if runs and runs[-1][1] == place:
            runs[-1] = (runs[-1][0], place + 1)
        else:
            runs.append((place, place + 1))
    return tuple(runs)
