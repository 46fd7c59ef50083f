"""Where a model is cut and in which order its stages run, found together: each decides how good the other is."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

from .actions import Placement
from .balance import Part, balance, moved, stage_costs
from .from_costs import EFFORT, Limit, Search, too_much
from .simulate import Costs, Timeline, simulate

# How far ranks may be from balanced so that stages are more equal. Whether that pays depends on the schedule.
WITHIN = (0.001, 0.005, 0.01, 0.02)


class Arrangement(NamedTuple):
    """`sizes`: how many parts each stage has, in order. `costs`: of these stages. `line`: the simulated run; its
    `schedule` has the placement."""

    sizes: tuple[int, ...]
    costs: Costs
    line: Timeline


def arrange(
    parts: Sequence[Part],
    placements: Sequence[Placement],
    microbatches: int,
    limit: Limit = None,
    *,
    effort: int = EFFORT,
    seed: int = 0,
) -> Arrangement:
    """Return the fastest way that is found to run a model of these parts, in one of the placements.

    Stages are balanced for each placement (see `balance`), and schedules are tried on them (see `best`). Then single
    parts are moved to other stages, and actions to other places, while that is faster. The same arguments give the same
    answer on every rank.

    Raises `ValueError` if no placement has as few stages as the model has parts, and `MemoryError` if no way fits.

    >>> from zerofn import schedules
    >>> block, head = Part(1.0, 1.1, 0.9), Part(2.0, 2.0, 2.0)
    >>> arrange([block] * 6 + [head], [schedules.Placement("v", 2, 2)], microbatches=4).line.schedule.num_stages
    4
    """
    search, sizes = Search(microbatches, limit), tuple[int, ...]()
    some = [x for x in placements if x.num_stages <= len(parts)] or placements[
        :1
    ]  # of which balance says what is wrong
    tried: dict[Placement, Costs] = {}
    for placement in some:
        for trial in dict.fromkeys(balance(parts, placement, microbatches, within) for within in WITHIN):
            before, tried[placement] = search.found, stage_costs(parts, trial, placement)
            search.try_stages(placement, tried[placement])
            sizes = sizes if search.found is before else trial
    if search.found is None:
        raise MemoryError("no schedule fits: " + "; ".join(too_much(*x, limit) for x in tried.items()) + ".")
    rng = random.Random(seed)
    while effort > 0:
        before, trial = search.found, _changed(sizes, rng) if rng.random() < 0.5 else sizes
        costs = search.costs if trial == sizes else stage_costs(parts, trial, before.placement)
        effort -= search.try_change(rng, costs, moves=rng.choice((1, 1, 2, 3)) if trial == sizes else 0)
        sizes = sizes if search.found is before else trial
    return Arrangement(sizes, search.costs, simulate(search.found, search.costs))


def _changed(sizes: tuple[int, ...], rng: random.Random) -> tuple[int, ...]:
    """One or two parts in other stages."""
    bounds = [0, *accumulate(sizes)]
    for _ in range(rng.choice((1, 1, 2)) if len(sizes) > 1 else 0):
        source, target = rng.sample(range(len(sizes)), 2)
        if bounds[source + 1] - bounds[source] > 1:
            bounds = moved(bounds, source, target)
    return tuple(b - a for a, b in pairwise(bounds))
