"""Places in one piece of memory for values that need it at different times, as registers are given."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from torch.fx import Node


class Span(NamedTuple):
    """Where in the step a value needs its memory: from node `start` to node `stop`, both included."""

    node: Node
    start: int
    stop: int
    nbytes: int


def pack(spans: Sequence[Span]) -> tuple[list[int], int]:
    """A first byte for each span such that those which overlap in time lie apart, and the bytes of all. Each goes where
    there is room first: those that begin first before others, or the largest before others, whichever takes less."""
    orders = (lambda k: (spans[k].start, -spans[k].nbytes), lambda k: (-spans[k].nbytes, spans[k].start))
    found = [_packed(spans, sorted(range(len(spans)), key=order)) for order in orders]
    return min(found, key=lambda x: x[1])


def _packed(spans: Sequence[Span], order: Sequence[int]) -> tuple[list[int], int]:
    """Places for spans that are given theirs in this order."""
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
