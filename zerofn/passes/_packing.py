"""Share one buffer among values that need memory at different times, as a compiler assigns registers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from torch.fx import Node


class Lifetime(NamedTuple):
    """The nodes, from `start` to `stop` inclusive, during which a value needs `nbytes` of memory."""

    node: Node
    start: int
    stop: int
    nbytes: int


def pack(spans: Sequence[Lifetime]) -> tuple[list[int], int]:
    """Return the first byte of each span, and the size of the buffer. Spans that overlap in time do not overlap in
    memory.

    Each span takes the first gap that is large enough. Two orders are tried, by start and by size; the smaller
    buffer wins.
    """
    orders = (lambda k: (spans[k].start, -spans[k].nbytes), lambda k: (-spans[k].nbytes, spans[k].start))
    found = [_packed(spans, sorted(range(len(spans)), key=order)) for order in orders]
    return min(found, key=lambda x: x[1])


def _packed(spans: Sequence[Lifetime], order: Sequence[int]) -> tuple[list[int], int]:
    """Place spans in this order."""
    times = np.array([spans[k][1:3] for k in order], dtype=np.int64).reshape(-1, 2)
    places, most = [0] * len(spans), 0
    for num, k in enumerate(order):
        span, at = spans[k], 0
        near = np.flatnonzero((times[:num, 0] <= span.stop) & (times[:num, 1] >= span.start))
        for start, stop in sorted((places[order[j]], places[order[j]] + spans[order[j]].nbytes) for j in near.tolist()):
            if at + span.nbytes <= start:
                break
            at = max(at, stop)
        places[k] = at
        most = max(most, at + span.nbytes)
    return places, most
