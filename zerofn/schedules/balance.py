"""Spread the layers of a model over stages, so that ranks have equal work.

A rank computes all of its stages, so ranks are balanced, and not stages. In a V, for example, rank 0 has the first and
the last stage: if the head takes as long as two layers, one of these stages has two layers less than others.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from itertools import accumulate, permutations
from typing import NamedTuple

from .actions import Placement
from .simulate import Costs

SHAKES = 40  # enough for the best way to spread a dozen parts over six stages, nearly always
WITHIN = 0.001  # of all time: solutions that differ by less are equally fast
EFFORT = 15_000  # ways that are looked at: a quarter of a second for 32 stages
Judge = Callable[[list[int]], tuple[float, ...]]


class Part(NamedTuple):
    """A part of a model that is never split: the embedding, a block, the final norm with the LM head.

    `f`, `i`, `w`: seconds of a microbatch's F, I and W. `crossing`: seconds of the transfer of what crosses a boundary
    in front of it, in either direction. Bytes: `saved` from F until I or B, `kept` from I until W, `fixed` all the
    time.

    >>> block = Part(f=1.0, i=1.1, w=0.9)
    >>> block.seconds
    3.0
    """

    f: float
    i: float
    w: float
    crossing: float = 0.0
    saved: float = 0.0
    kept: float = 0.0
    fixed: float = 0.0

    @property
    def seconds(self) -> float:
        """All of its work for a microbatch."""
        return self.f + self.i + self.w


def balance(parts: Sequence[Part], placement: Placement, microbatches: int) -> tuple[int, ...]:
    """Return how many parts each stage has, in order; at least one each.

    The search minimises the time at which all ranks have ended, under the assumption that ranks wait only for their
    first microbatch. Among solutions that are equally fast, to a thousandth, it takes the one whose boundaries are the
    cheapest to cross, and then the one with the most equal stages.

    It starts from equal stages. While that helps, it moves one part from one stage to another, and shifts all stages
    between them by one part. Then it changes the best solution at random, and searches again from there. Raises
    `ValueError` if there are fewer parts than stages.

    >>> from zerofn import schedules
    >>> block, head = Part(1.0, 1.1, 0.9), Part(2.0, 2.0, 2.0)
    >>> balance([block] * 8 + [head], schedules.Placement("line", 2), microbatches=8)
    (5, 4)
    """
    if len(parts) < placement.num_stages:
        raise ValueError(
            f"{placement} has {placement.num_stages} stages, but the model has only {len(parts)} parts. Use fewer "
            "ranks or chunks, or divide the model into more parts."
        )
    search = _Search(parts, placement, microbatches)
    bounds = search.improved(search.equal(placement.num_stages), search.by_time)
    rng = random.Random(0)
    for _ in range(SHAKES if placement.num_stages > 1 else 0):
        other = search.improved(search.shaken(bounds, rng), search.by_time)
        bounds = min(bounds, other, key=search.by_time)
    search.judged = 0
    bounds = search.improved(bounds, search.by_all)
    return tuple(b - a for a, b in zip(bounds, bounds[1:], strict=False))


def stage_costs(parts: Sequence[Part], sizes: Sequence[int], placement: Placement) -> Costs:
    """Return the costs of stages that have these numbers of parts.

    >>> from zerofn import schedules
    >>> stage_costs([Part(1, 2, 3), Part(4, 5, 6), Part(7, 8, 9)], (1, 2), schedules.Placement("line", 2)).f
    (1, 11)
    """
    bounds = [0, *accumulate(sizes)]
    stages = [parts[a:b] for a, b in zip(bounds, bounds[1:], strict=False)]
    columns = {
        x: tuple(sum(getattr(p, x) for p in stage) for stage in stages) for x in ("f", "i", "w", "saved", "kept")
    }
    crossing = tuple(stage[0].crossing for stage in stages[1:])
    fixed = tuple(sum(p.fixed for s in placement.stages_of(r) for p in stages[s]) for r in range(placement.ranks))
    return Costs(**columns, down=crossing, up=crossing, fixed=fixed)


class _Search:
    """Boundaries between stages: stage s has the parts from `bounds[s]` on, up to `bounds[s + 1]`. `judged`: how many
    have been looked at."""

    def __init__(self, parts: Sequence[Part], placement: Placement, microbatches: int) -> None:
        self._parts, self._microbatches, self._ranks = parts, microbatches, placement.ranks
        self._rank_of = [placement.rank_of(s) for s in range(placement.num_stages)]
        self._work = [0.0, *accumulate(x.seconds for x in parts)]
        self._forward = [0.0, *accumulate(x.f for x in parts)]
        self._unit = microbatches * self._work[-1] / placement.ranks * WITHIN or 1.0
        self.judged = 0

    def equal(self, stages: int) -> list[int]:
        """Each stage ends where it comes closest to its share of all work."""
        bounds, last = [0], len(self._parts)
        for s in range(1, stages):
            share = self._work[-1] * s / stages
            could = range(bounds[-1] + 1, last - (stages - s) + 1)
            bounds.append(min(could, key=lambda x: (abs(self._work[x] - share), x)))
        return [*bounds, last]

    def by_time(self, bounds: list[int]) -> tuple[float, ...]:
        """When the last rank ends, then how unequal ranks are."""
        loads = self._loads(bounds)
        return self._end(bounds, loads), sum(x * x for x in loads)

    def by_all(self, bounds: list[int]) -> tuple[float, ...]:
        """When the last rank ends, rounded; then transfers; then how unequal stages are, and ranks."""
        end = self._end(bounds, self._loads(bounds))
        crossing = sum(self._parts[b].crossing for b in bounds[1:-1])
        stages = (self._work[b] - self._work[a] for a, b in zip(bounds, bounds[1:], strict=False))
        return round(end / self._unit), crossing, sum(x * x for x in stages), end

    def improved(self, bounds: list[int], judge: Judge) -> list[int]:
        """Move parts between stages until no move of one is better, or enough has been looked at."""
        best, better = judge(bounds), True
        while better and self.judged < EFFORT:
            better = False
            for source, target in permutations(range(len(self._rank_of)), 2):
                if bounds[source + 1] - bounds[source] > 1:
                    trial = _moved(bounds, source, target)
                    if (found := judge(trial)) < best:
                        bounds, best, better = trial, found, True
        return bounds

    def shaken(self, bounds: list[int], rng: random.Random) -> list[int]:
        """Move a few parts anywhere."""
        for _ in range(rng.choice((2, 3, 4))):
            source, target = rng.sample(range(len(self._rank_of)), 2)
            if bounds[source + 1] - bounds[source] > 1:
                bounds = _moved(bounds, source, target)
        return bounds

    def _loads(self, bounds: list[int]) -> list[float]:
        loads = [0.0] * self._ranks
        for rank, a, b in zip(self._rank_of, bounds, bounds[1:], strict=False):
            loads[rank] += self._work[b] - self._work[a]
        return loads

    def _end(self, bounds: list[int], loads: list[float]) -> float:
        """When all ranks have ended: the first microbatch comes to a rank, at the pace of the slowest stage, and the
        rank does its work on all microbatches."""
        self.judged += 1
        forward = [self._forward[b] for b in bounds]
        slowest = max(b - a for a, b in zip(forward, forward[1:], strict=False))
        latest = came = 0.0
        for rank, load in enumerate(loads):  # whose first stage has the same number
            if rank:
                came += slowest + self._parts[bounds[rank]].crossing
            latest = max(latest, came + self._microbatches * load)
        return latest


def _moved(bounds: Sequence[int], source: int, target: int) -> list[int]:
    """Boundaries with one part less in a stage and one more in another, with those between them shifted by one."""
    low, high, step = (source, target, -1) if source < target else (target, source, 1)
    return [b + step if low < i <= high else b for i, b in enumerate(bounds)]
