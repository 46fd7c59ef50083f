"""What two slices of a leaf have in common, as runs of consecutive elements in both of them.

A slice is raveled where it lies: in a shard, in a file. What two slices share is then a few runs, or many short ones at
equal distances (columns of a matrix), which count as one `Runs`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from ..comm.mesh import Mesh
from .cuts import Cut, Intervals

Region = tuple[tuple[int, Intervals], ...]  # (dim, its intervals), for each dim that is cut; () is the whole leaf


class Runs(NamedTuple):
    """`count` runs of `length` elements. The k-th begins at `start + k * step` of the raveled source, and at
    `at + k * stride` of the part of the raveled target that was asked for.
    """

    start: int
    at: int
    length: int
    count: int = 1  # type: ignore[assignment]  # tuple.count gives way
    step: int = 0
    stride: int = 0


class _Segment(NamedTuple):
    """What two slices share along one dim, without a gap: the first place in each of them."""

    source: int
    target: int
    length: int


def makes_up(cut: Cut) -> bool:
    """Return whether each element of a dim is in one of the slices of a cut, however many ranks have that slice.

    >>> makes_up(Cut("tensor", 0, 3, (((0, 2),), ((2, 3),)))), makes_up(Cut("tensor", 0, 3, (((0, 2),), ((1, 3),))))
    (True, False)
    """
    intervals = sorted(x for slices in set(cut.slices) for x in slices if x[0] != x[1])
    ends = [0, *(end for interval in intervals for end in interval), cut.size]
    return ends == sorted(ends) and ends[::2] == ends[1::2]


def region_of(cuts: Iterable[Cut], mesh: Mesh) -> Region:
    """Return which part of a leaf with these cuts this rank has."""
    found: dict[int, Intervals] = {}
    for cut in sorted(cuts, key=lambda cut: cut.length(mesh.axis(cut.axis).rank), reverse=True):
        found[cut.dim] = cut.slices[mesh.axis(cut.axis).rank]  # of two along one dim, one is of stages: all or nothing
    return tuple(sorted(found.items()))


def shape_in(shape: Sequence[int], region: Region) -> tuple[int, ...]:
    """Return the shape of a slice of a leaf of `shape`.

    >>> shape_in((4, 6), ((1, ((0, 2), (5, 6))),))
    (4, 3)
    """
    sizes = {dim: sum(b - a for a, b in intervals) for dim, intervals in region}
    return tuple(sizes.get(d, n) for d, n in enumerate(shape))


def overlap(shape: Sequence[int], source: Region, target: Region, start: int, stop: int) -> Iterator[Runs]:
    """Yield where elements [start, stop) of the raveled target lie in the raveled source; nothing for those that the
    source lacks. Both are slices of one leaf of `shape`.

    >>> list(overlap((4, 6), (), ((1, ((2, 4),)),), 1, 8))  # of columns 2 and 3, without the first element
    [Runs(start=3, at=0, length=1, count=1, step=0, stride=0), Runs(start=8, at=1, length=2, count=3, step=6, stride=2)]
    """
    if start >= stop:
        return
    theirs, mine = shape_in(shape, source), shape_in(shape, target)
    segments = [_segments(n, dict(source).get(d), dict(target).get(d)) for d, n in enumerate(shape)]
    differ = [d for d, x in enumerate(segments) if x != [(0, 0, mine[d])] or theirs[d] != mine[d]]
    if not differ:
        yield Runs(start, 0, stop - start)
        return
    # The last dim that differs cuts rows into runs; between it and the one before lie whole rows at equal distances.
    dim, lead = differ[-1], differ[-2] + 1 if len(differ) > 1 else 0
    num_rows, inner = math.prod(mine[lead:dim]), math.prod(mine[dim + 1 :])
    row, their_row = mine[dim] * inner, theirs[dim] * inner
    block = num_rows * row
    for k in range(start // block, -(-stop // block)):
        place = _place(k, mine[:lead], theirs[:lead], segments)
        if place is None:
            continue
        begin = k * block - start
        for found in segments[dim]:
            wanted = (max(0, -begin), min(block, stop - k * block))
            for first, skip, length, count in _rows(num_rows, row, found.target * inner, found.length * inner, wanted):
                yield Runs(
                    (place * num_rows + first) * their_row + found.source * inner + skip,
                    begin + first * row + found.target * inner + skip,
                    length,
                    count,
                    their_row if count > 1 else 0,
                    row if count > 1 else 0,
                )


def _segments(size: int, source: Intervals | None, target: Intervals | None) -> list[_Segment]:
    """Return what two slices share along a dim, in the target's order."""
    theirs, mine = (list(_numbered(((0, size),) if x is None else x)) for x in (source, target))
    found: list[_Segment] = []
    for (a, b, at), (c, d, place) in itertools.product(mine, theirs):
        low, high = max(a, c), min(b, d)
        if low < high:
            found.append(_Segment(place + low - c, at + low - a, high - low))
    joined: list[_Segment] = []
    for x in sorted(found, key=lambda x: x.target):
        last = joined[-1] if joined else None
        if last and (last.source + last.length, last.target + last.length) == (x.source, x.target):
            joined[-1] = last._replace(length=last.length + x.length)
        else:
            joined.append(x)
    return joined


def _numbered(intervals: Intervals) -> Iterator[tuple[int, int, int]]:
    """Yield each interval with its place in the slice."""
    at = 0
    for a, b in intervals:
        yield a, b, at
        at += b - a


def _place(k: int, mine: Sequence[int], theirs: Sequence[int], segments: Sequence[Sequence[_Segment]]) -> int | None:
    """Return the source's number of the target's k-th block, None if it lacks it. `mine`, `theirs`: the dims of
    blocks.
    """
    index = []
    for n in reversed(mine):
        k, x = divmod(k, n)
        index.append(x)
    place = 0
    for x, n, found in zip(reversed(index), theirs, segments, strict=False):
        there = next((s.source + x - s.target for s in found if s.target <= x < s.target + s.length), None)
        if there is None:
            return None
        place = place * n + there
    return place


def _rows(
    num_rows: int, row: int, at: int, length: int, wanted: tuple[int, int]
) -> Iterator[tuple[int, int, int, int]]:
    """Yield (first row, elements to skip, length, number of rows) of what lies in [start, stop) = `wanted`, where every
    row of `row` elements has a run of `length` from `at` on.
    """
    start, stop = wanted
    first = max(0, -(-(start - at) // row))  # of the rows whose run is wanted as a whole
    end = min(num_rows, (stop - at - length) // row + 1)
    if first > 0:
        yield from _part(first - 1, row, at, length, wanted)
    if first < end:
        yield first, 0, length, end - first
    if end < num_rows and end != first - 1:  # else all that is wanted lies in one run
        yield from _part(end, row, at, length, wanted)


def _part(k: int, row: int, at: int, length: int, wanted: tuple[int, int]) -> Iterator[tuple[int, int, int, int]]:
    begin = k * row + at
    a, b = max(begin, wanted[0]), min(begin + length, wanted[1])
    if a < b:
        yield k, a - begin, b - a, 1
