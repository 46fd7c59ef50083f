"""Which values are dropped and brought back, so that a step keeps to a budget of memory."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np


class Drop(NamedTuple):
    """A value that may be away while nodes (start, stop), both excluded, run: `nbytes` less there, for `seconds` of
    work or transfer to bring it back. Of those that name one value, `of`, one is enough."""

    key: object
    start: int
    stop: int
    nbytes: int
    seconds: float
    of: str = ""


def cheapest(live: Sequence[int], drops: Iterable[Drop], budget: int) -> tuple[list[Drop], int]:
    """Drops after which no entry of `live`, bytes at each node, exceeds `budget`, and the peak that is left: above the
    budget if all of them are not enough.

    Those that free most, for longest, for each second come first, where there is too much (Belady's rule, weighted by
    what bringing back costs); then those that were not needed after all are taken back, the dearest first.
    """
    level = np.array(live, dtype=np.int64)
    taken: list[Drop] = []
    away: set[str] = set()
    for drop in sorted(drops, key=_dearness):
        inside = level[drop.start + 1 : drop.stop]
        if inside.size and inside.max() > budget and drop.of not in away:
            inside -= drop.nbytes
            taken.append(drop)
            away.update({drop.of} - {""})
    for drop in sorted(taken, key=lambda x: -x.seconds):
        inside = level[drop.start + 1 : drop.stop]
        if inside.max() + drop.nbytes <= budget:
            inside += drop.nbytes
            taken.remove(drop)
    return sorted(taken, key=lambda x: (x.start, x.stop), reverse=True), int(level.max())


def _dearness(drop: Drop) -> tuple[float, int]:
    return drop.seconds / (drop.nbytes * max(1, drop.stop - drop.start)), drop.start
