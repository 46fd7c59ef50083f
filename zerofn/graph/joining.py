"""Which segments of a forward pass are joined, since too much would have to be kept between them."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

WIDE = 32  # segments that are joined at most: what a layer may have of units
FINER = 1.25  # times the least memory, for segments as small as they can be: their units are gathered for less long
STEP = 1.2  # from one size of segments that is tried to the next


class Span(NamedTuple):
    """Memory that is made in one segment and used until another; `kept`: whether the backward pass reads it."""

    made: int
    used: int
    nbytes: int
    kept: bool


def joined(spans: Iterable[Span], count: int) -> list[int]:
    """For each of `count` segments the number of that which it becomes a part of.

    What is made before the end of a segment and used behind it is kept, once, however many ends it crosses; all else
    is made again, a segment at a time. Segments are so large that both together take little memory, and no larger.
    """
    crossing, inner = (np.cumsum(x, axis=1) for x in _bytes(spans, count))
    largest = int(inner[:-1, 0].max(initial=0))
    found: list[tuple[int, list[int]]] = []
    while not found or largest < min(found)[0]:
        kept, numbers = _least(crossing, inner, largest)
        found.append((kept + largest, numbers))
        largest = int(largest * STEP) + 1
    return next(numbers for total, numbers in found if total <= FINER * min(found)[0])


def _bytes(spans: Iterable[Span], count: int) -> tuple[np.ndarray, np.ndarray]:
    """[k, w]: bytes made in segment k - w that are used behind k, and those that are not but kept."""
    crossing, inner = np.zeros((2, count, WIDE), dtype=np.int64)
    for x in spans:
        for k in range(x.made, min(count, x.made + WIDE)):
            if k < x.used:
                crossing[k, k - x.made] += x.nbytes
            elif x.kept:
                inner[k, k - x.made] += x.nbytes
    return crossing, inner


def _least(crossing: np.ndarray, inner: np.ndarray, largest: int) -> tuple[int, list[int]]:
    """The least that is kept between segments of `largest` bytes at most, and these; the last one, which is not made
    again, may be larger. Arguments: [k, w], bytes when segments k - w to k are one."""
    count = len(inner)
    kept = np.zeros(count + 1, dtype=np.int64)  # [k]: between the segments before k
    first = [0] * count
    for k in range(count):
        wide = min(k + 1, WIDE)
        limit = largest if k < count - 1 else max(largest, inner[k, 0])
        fits = int(np.searchsorted(inner[k, :wide], limit, side="right"))
        total = kept[k + 1 - fits : k + 1][::-1] + crossing[k, :fits]
        best = int(total.argmin())
        kept[k + 1], first[k] = total[best], k - best
    starts, end = set(), count
    while end := first[end - 1]:
        starts.add(end)
    return int(kept[count]), list(itertools.accumulate(int(k in starts) for k in range(count)))
