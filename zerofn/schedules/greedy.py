"""Ranks that decide in simulated time what to compute next: schedules that are made for given costs.

No schedule of a paper knows how long F, I and W take. Here W, for which nobody waits, is computed where its rank would
wait otherwise, or where memory asks for it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from heapq import heappop, heappush
from itertools import product
from math import inf
from typing import NamedTuple

from .actions import Action, Kind, Placement
from .simulate import Costs

# What a rank does at a time: begins an action of a kind on a stage, of the stage's next microbatch; or looks again at a
# later time; or, with None, when something new can be read.
Choice = tuple[Kind, int] | float | None
Policy = Callable[[int, float], Choice]
_ROUNDING = 1e-9  # of costs, beside sums in another order


class Ranks:
    """Ranks in simulated time. `limit`: the most bytes of each rank, with what it always has.

    `ready[kind][stage]`: when that of the stage's next microbatches can begin, in ascending order; `inf` is not known.
    `held`: bytes of each rank; `peaks`: the most of them so far. `orders`: what each rank has done.

    The backward pass of stage 0 is a W here: nobody waits for it.
    """

    def __init__(self, placement: Placement, microbatches: int, costs: Costs, limit: Sequence[float]) -> None:
        n, self.placement, self.microbatches = placement.num_stages, placement, microbatches
        self.rank_of = [placement.rank_of(s) for s in range(n)]
        self.stages = [placement.stages_of(r) for r in range(placement.ranks)]
        self.saved = costs.saved
        self.kept = (costs.saved[0], *costs.kept[1:])
        weights = (costs.seconds(0, "B"), *costs.w[1:])
        self.seconds: dict[Kind, Sequence[float]] = {"F": costs.f, "I": costs.i, "W": weights}
        self._down = [costs.transfer(placement, s, s + 1) for s in range(n - 1)]
        self._up = [costs.transfer(placement, s + 1, s) for s in range(n - 1)]
        self.ready: dict[Kind, list[list[float]]] = {"F": [[] for _ in range(n)], "I": [[] for _ in range(n)]}
        self.ready["F"][0] = [0.0] * microbatches
        self.done: dict[Kind, list[int]] = {"F": [0] * n, "I": [0] * n, "W": [0] * n}
        self.weights: list[list[tuple[float, int]]] = [[] for _ in self.stages]  # W that may begin from a time on
        self.margin = [max(0.0, *(self.kept[s] - self.saved[s] for s in stages)) for stages in self.stages]
        self.limit = [x + _ROUNDING * abs(x) for x in limit]
        self.held = list(costs.fixed or (0.0,) * placement.ranks)
        self.peaks = list(self.held)
        self.orders: list[list[Action]] = [[] for _ in self.stages]
        self._free = [0.0] * placement.ranks
        self._left = [
            microbatches * sum(self.seconds[kind][s] for s in stages for kind in self.seconds if s or kind != "I")
            for stages in self.stages
        ]
        self._heap: list[tuple[float, int]] = []

    def run(self, choose: Policy, bound: float = inf) -> float | None:
        """Let ranks do what `choose` says until all is done. Return the makespan; None if they get stuck, or if it
        would be `bound` or more."""
        self._heap = [(0.0, r) for r in range(len(self.stages))]
        actions = (3 * len(self.rank_of) - 1) * self.microbatches
        while actions:
            if not self._heap:
                return None
            t, rank = heappop(self._heap)
            if t < self._free[rank]:
                continue
            choice = choose(rank, t)
            if isinstance(choice, tuple):
                end = self._begin(rank, t, *choice)
                if end + self._left[rank] >= bound:
                    return None
                actions -= 1
                heappush(self._heap, (end, rank))
            elif choice is not None:
                heappush(self._heap, (choice, rank))
        return max(self._free)

    def next_ready(self, kind: Kind, stage: int) -> float:
        """When F or I of a stage's next microbatch may begin, as far as is known."""
        times, done = self.ready[kind][stage], self.done[kind][stage]
        return times[done] if done < len(times) else inf

    def weight(self, rank: int, t: float) -> int | None:
        """The stage of the W that a rank could begin and that waits longest."""
        return next((stage for ready, stage in self.weights[rank] if ready <= t), None)

    def has_room(self, rank: int, kind: Kind, stage: int) -> bool:
        """Whether what F or I of a stage adds fits."""
        added = self.saved[stage] if kind == "F" else self.kept[stage] - self.saved[stage]
        return added <= 0 or self.held[rank] + added <= self.limit[rank]

    def _begin(self, rank: int, t: float, kind: Kind, stage: int) -> float:
        """Do an action from `t` on; return its end."""
        k = self.done[kind][stage]
        self.done[kind][stage] += 1
        self.orders[rank].append(Action(stage, "B" if kind == "W" and not stage else kind, k))
        seconds = self.seconds[kind][stage]
        end = self._free[rank] = t + seconds
        self._left[rank] -= seconds
        if kind == "F":
            self.held[rank] += self.saved[stage]
            if stage + 1 < len(self.rank_of):
                self._can_begin("F", stage + 1, end + self._down[stage])
            else:
                self._can_begin("I", stage, end)
        elif kind == "I":
            self.held[rank] += self.kept[stage] - self.saved[stage]
            self.weights[rank].append((end, stage))
            self._can_begin("I", stage - 1, end + self._up[stage - 1])
        else:
            self.held[rank] -= self.kept[stage]
            self.weights[rank].remove(next(x for x in self.weights[rank] if x[1] == stage))
        self.peaks[rank] = max(self.peaks[rank], self.held[rank])
        return end

    def _can_begin(self, kind: Kind, stage: int, t: float) -> None:
        rank = self.rank_of[stage]
        if kind == "I" and not stage:
            self.weights[rank].append((t, stage))
        else:
            self.ready[kind][stage].append(t)
        heappush(self._heap, (max(t, self._free[rank]), rank))


def in_order(ranks: Ranks, orders: Sequence[Sequence[tuple[Kind, int]]], patience: float) -> Policy:
    """F and I in the given order. A W begins where its rank would wait for `patience` of its time or longer, or where
    memory asks for it."""
    at = [0] * len(orders)

    def choose(rank: int, t: float) -> Choice:
        order = orders[rank]
        if at[rank] == len(order):
            stage = ranks.weight(rank, t)
            return None if stage is None else ("W", stage)
        kind, stage = order[at[rank]]
        start, room = ranks.next_ready(kind, stage), ranks.has_room(rank, kind, stage)
        if start <= t and room:
            at[rank] += 1
            return kind, stage
        weight = ranks.weight(rank, t)
        if weight is not None and (not room or start - t >= patience * ranks.seconds["W"][weight]):
            return "W", weight
        return start if room and start < inf else None

    return choose


def one_at_a_time(placement: Placement, costs: Costs) -> tuple[float, ...]:
    """Bytes of each rank with one microbatch at a time: what `by_costs` needs at least. W runs right after an I that
    adds memory."""
    fixed = costs.fixed or (0.0,) * placement.ranks
    by_rank = [placement.stages_of(r) for r in range(placement.ranks)]
    return tuple(
        x + sum(costs.saved[s] for s in stages) + max(max(0.0, costs.kept[s] - costs.saved[s]) for s in stages)
        for x, stages in zip(fixed, by_rank, strict=True)
    )


class Style(NamedTuple):
    """How `by_costs` decides. `deep`: of several F, that of the latest stage goes first, else that of the earliest.
    `patience`: wait for an F or I that can begin within this part of a W, instead of beginning the W. `forward_first`:
    F goes before I. `lag`: how many W may wait."""

    deep: bool
    patience: float
    forward_first: bool
    lag: float


STYLES = tuple(Style(*x) for x in product((True, False), (0.0, 0.9), (False, True), (inf, 2)))


def by_costs(ranks: Ranks, style: Style) -> Policy:
    """Whatever can begin: I of the oldest microbatch, else F, else W.

    A rank with several stages begins no F whose memory the oldest microbatch needs for its later stages there: else
    every rank could be full of microbatches that cannot go on. So it never gets stuck if one microbatch fits.
    """

    def fits(rank: int, stage: int) -> bool:
        stages, done = ranks.stages[rank], ranks.done["F"]
        oldest = done[stages[-1]]
        rest = sum(ranks.saved[s] for s in stages if done[s] <= oldest and (s, oldest) != (stage, done[stage]))
        return ranks.held[rank] + ranks.saved[stage] + rest + ranks.margin[rank] <= ranks.limit[rank]

    def choose(rank: int, t: float) -> Choice:
        stages = ranks.stages[rank]
        backward = [s for s in stages if ranks.next_ready("I", s) <= t and ranks.has_room(rank, "I", s)]
        forward = [s for s in stages if ranks.next_ready("F", s) <= t]
        fitting = [s for s in forward if fits(rank, s)]
        weight = ranks.weight(rank, t)
        full = forward and not fitting and not backward
        if weight is not None and (full or len(ranks.weights[rank]) > style.lag):
            return "W", weight
        if fitting and (style.forward_first or not backward):
            return "F", (max if style.deep else min)(fitting)
        if backward:
            return "I", min(backward, key=lambda s: (ranks.done["I"][s], -s))
        later = [ranks.next_ready("I", s) for s in stages] + [ranks.next_ready("F", s) for s in stages if fits(rank, s)]
        soon = min((x for x in later if x > t), default=inf)
        if weight is not None and soon >= t + style.patience * ranks.seconds["W"][weight]:
            return "W", weight
        return soon if soon < inf else None

    return choose
