"""The fastest schedule that is found for given costs, within a limit of memory.

Candidates are the named schedules of each placement, as they are and with W placed by simulated time; schedules that
ranks make by themselves, which fit wherever one microbatch does; and small changes of the best of all these.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from math import inf
from typing import cast

from ..util.sizes import in_words
from .actions import Kind, Placement, Schedule
from .greedy import STYLES, Policy, Ranks, by_costs, in_order, one_at_a_time
from .named import NAMES, ScheduleName, make
from .simulate import Costs, Timeline, simulate

Limit = float | Sequence[float] | None  # bytes of every rank, or of each
Pattern = list[list[tuple[Kind, int]]]  # each rank's F and I, as (kind, stage)

PATIENCE = (0.0, 0.3, 0.6, 0.95)  # of `fill`; each is the best one for some costs
EFFORT = 200_000  # actions that `best` simulates to improve on a schedule: about a second
_SLACK = 1e-9  # of times that sums in another order make


def fill(schedule: Schedule, costs: Costs, limit: Limit = None, patience: float = 0.0) -> Schedule | None:
    """Return a schedule with the same F and I, but with each W at a moment when its rank would wait, or when memory
    would run out.

    A B becomes an I and a W. `patience`: a W begins only if its rank would wait for at least this fraction of the W's
    time. Returns None if the limit is exceeded with any order of W.

    >>> from zerofn import schedules
    >>> print(fill(schedules.make("1f1b", ranks=2, microbatches=3), schedules.Costs.even(2)))
    0F0,0F1,0F2,0B0,0B1,0B2
    1F0,1I0,1F1,1I1,1F2,1I2,1W0,1W1,1W2
    """
    ranks = Ranks(schedule.placement, schedule.microbatches, costs, _limits(limit, schedule.placement))
    found = ranks.run(in_order(ranks, _pattern(schedule), patience))
    return None if found is None else _made(f"{schedule.name}, filled", ranks)


def best(
    costs: Mapping[Placement, Costs], microbatches: int, limit: Limit = None, *, effort: int = EFFORT, seed: int = 0
) -> Timeline:
    """Return the simulated run of the fastest schedule found; `best(...).schedule` is the schedule.

    `costs`: of the stages of each placement that may be taken. `limit`: bytes of a rank, one number for all ranks or
    one for each. `effort`: how many actions to simulate in the search for a faster schedule; the default takes about a
    second. `seed`: of the random changes that the search tries. The same arguments give the same schedule on every
    rank.

    Raises `MemoryError` if not even one microbatch at a time fits.

    >>> from zerofn import schedules
    >>> line, loop = schedules.Placement("line", 4), schedules.Placement("loop", 4, 2)
    >>> costs = {line: schedules.Costs.even(4), loop: schedules.Costs.even(8, 0.5, 0.5, 0.5)}
    >>> best(costs, microbatches=8).schedule.name
    'interleaved-zb'
    """
    search = _Search(microbatches, limit)
    for placement, its in costs.items():
        search.try_stages(placement, its)
    if search.found is None:
        raise MemoryError("no schedule fits: " + "; ".join(_too_much(*x, limit) for x in costs.items()) + ".")
    rng = random.Random(seed)
    while effort > 0:
        effort -= search.try_change(rng)
    return simulate(search.found, search.costs)


def usual_limit(costs: Mapping[Placement, Costs], microbatches: int) -> float:
    """Return the default limit of the bytes that a rank may hold. Every placement has a named schedule that fits.

    For each placement, take the named schedule that needs the least memory, and the bytes of its worst rank. The limit
    is the largest of these numbers. Without a limit, the fastest schedule would store the inputs of W of many
    microbatches.

    >>> from zerofn import schedules
    >>> usual_limit({schedules.Placement("line", 4): schedules.Costs.even(4)}, microbatches=16)
    4.0
    """
    needs = []
    for placement, its in costs.items():
        lines = (simulate(x, its) for x in _named(placement, microbatches))
        needs.append(min(max(line.peak_bytes) for line in lines))
    return max(needs)


class _Search:
    """The fastest schedule so far, `found`, with the `costs` that it is for; of equally fast ones that whose worst rank
    holds the fewest bytes."""

    def __init__(self, microbatches: int, limit: Limit) -> None:
        self.found: Schedule | None = None
        self.costs = Costs.even(1)  # until something is found
        self._seconds, self._bytes = inf, inf
        self._pattern: Pattern = []
        self._microbatches, self._limit = microbatches, limit

    def try_stages(self, placement: Placement, costs: Costs) -> None:
        """Named schedules as they are, and with W placed again; then those that ranks make by themselves."""
        for schedule in _named(placement, self._microbatches):
            self._try_named(schedule, costs)
        for style in () if _short(placement, costs, self._limit) else STYLES:
            ranks = self._ranks(placement, costs)
            self._run(f"greedy {placement.style}", costs, ranks, by_costs(ranks, style))

    def try_change(self, rng: random.Random) -> int:
        """Take the best schedule with some of its F and I moved, if that is faster. Return how many actions were
        simulated for it, or 50, as setting out takes as long."""
        assert self.found is not None
        order = [list(x) for x in self._pattern]
        for _ in range(rng.choice((1, 1, 2, 3))):
            _move_one(order[rng.randrange(len(order))], rng)
        name, costs = self.found.name, self.costs
        ranks = self._ranks(self.found.placement, costs)
        policy = in_order(ranks, order, rng.choice(PATIENCE))
        self._run(name if name.endswith("improved") else f"{name}, improved", costs, ranks, policy, 1 - _SLACK)
        return max(50, sum(map(len, ranks.orders)))

    def _try_named(self, schedule: Schedule, costs: Costs) -> None:
        line = simulate(schedule, costs)
        limits = _limits(self._limit, schedule.placement)
        if all(peak <= most * (1 + _SLACK) for peak, most in zip(line.peak_bytes, limits, strict=True)):
            self._offer(line.makespan, max(line.peak_bytes), costs, lambda: schedule)
        for patience in PATIENCE:
            ranks = self._ranks(schedule.placement, costs)
            self._run(f"{schedule.name}, filled", costs, ranks, in_order(ranks, _pattern(schedule), patience))

    def _ranks(self, placement: Placement, costs: Costs) -> Ranks:
        return Ranks(placement, self._microbatches, costs, _limits(self._limit, placement))

    def _run(self, name: str, costs: Costs, ranks: Ranks, policy: Policy, within: float = 1 + _SLACK) -> None:
        """Let ranks do what they are told while they may be the fastest."""
        seconds = ranks.run(policy, self._seconds * within)
        if seconds is not None:
            self._offer(seconds, max(ranks.peaks), costs, lambda: _made(name, ranks))

    def _offer(self, seconds: float, nbytes: float, costs: Costs, made: Callable[[], Schedule]) -> None:
        faster = seconds < self._seconds * (1 - _SLACK)
        if faster or (seconds <= self._seconds * (1 + _SLACK) and nbytes < self._bytes):
            self._seconds, self._bytes, self.costs, self.found = seconds, nbytes, costs, made()
            self._pattern = _pattern(self.found)


def _named(placement: Placement, microbatches: int) -> list[Schedule]:
    return [
        make(cast(ScheduleName, name), placement.ranks, microbatches, placement.chunks)
        for name, row in NAMES.items()
        if row.style == placement.style and (row.any_chunks or row.chunks == placement.chunks)
    ]


def _made(name: str, ranks: Ranks) -> Schedule:
    return Schedule(name, ranks.placement, ranks.microbatches, tuple(map(tuple, ranks.orders)))


def _pattern(schedule: Schedule) -> Pattern:
    """B count as I; stage 0's backward pass is placed like W."""
    wanted = ((a for a in order if a.kind == "F" or (a.kind != "W" and a.stage)) for order in schedule.orders)
    return [[(a.makes.kind, a.stage) for a in order] for order in wanted]


def _move_one(order: list[tuple[Kind, int]], rng: random.Random) -> None:
    """Move an entry of a list to a later place. Microbatches follow from places, so each stage keeps their order."""
    at = rng.randrange(len(order))
    order.insert(at + rng.choice((1, 1, 2, 3)), order.pop(at))


def _limits(limit: Limit, placement: Placement) -> tuple[float, ...]:
    if isinstance(limit, Sequence):
        if len(limit) != placement.ranks:
            raise ValueError(f"{placement} needs {placement.ranks} limits, got {len(limit)}.")
        return tuple(limit)
    return (inf if limit is None else limit,) * placement.ranks


def _short(placement: Placement, costs: Costs, limit: Limit) -> list[tuple[int, float, float]]:
    """Ranks for which one microbatch is too much: (rank, bytes needed, limit)."""
    needed = zip(one_at_a_time(placement, costs), _limits(limit, placement), strict=True)
    return [(rank, need, most) for rank, (need, most) in enumerate(needed) if need > most * (1 + _SLACK)]


def _too_much(placement: Placement, costs: Costs, limit: Limit) -> str:
    """Why no schedule of a placement fits, for an error."""
    rank, need, most = max(_short(placement, costs, limit), key=lambda x: x[1] - x[2])
    return f"rank {rank} of {placement} holds {in_words(need)} with one microbatch, and its limit is {in_words(most)}"
