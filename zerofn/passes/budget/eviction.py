"""Select values to drop and bring back until a step fits a memory budget."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np


class Drop(NamedTuple):
    """A value that may leave memory while nodes in (start, stop) run: it frees `nbytes` there and costs `seconds` to
    bring back.

    `of` names the value. Different drops of one value exclude each other.
    """

    key: object
    start: int
    stop: int
    nbytes: int
    seconds: float
    of: str = ""


def cheapest(live: Sequence[int], drops: Iterable[Drop], budget: int) -> tuple[list[Drop], int]:
    """Return drops that bring every entry of `live`, bytes at each node, below `budget`, and the peak that remains.

    The peak stays above the budget if all drops are not enough. Drops that free the most bytes for the longest time
    at the least cost come first (Belady's rule, weighted by the cost of bringing the value back). Then drops that
    turned out not to be needed are undone, the most expensive first.
    """
    level = np.array(live, dtype=np.int64)
    taken: list[Drop] = []
    evicted: set[str] = set()
    for drop in sorted(drops, key=_cost):
        inside = level[drop.start + 1 : drop.stop]
        if inside.size and inside.max() > budget and drop.of not in evicted:
            inside -= drop.nbytes
            taken.append(drop)
            evicted.update({drop.of} - {""})
    for drop in sorted(taken, key=lambda x: -x.seconds):
        inside = level[drop.start + 1 : drop.stop]
        if inside.max() + drop.nbytes <= budget:
            inside += drop.nbytes
            taken.remove(drop)
    return sorted(taken, key=lambda x: (x.start, x.stop), reverse=True), int(level.max())


def _cost(drop: Drop) -> tuple[float, int]:
    """Return the seconds for each byte and node that a drop frees; then its start, to break ties."""
    return drop.seconds / (drop.nbytes * max(1, drop.stop - drop.start)), drop.start
