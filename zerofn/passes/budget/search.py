"""Search for a schedule that fits a memory budget: which values stay, and which are dropped and brought back."""

from __future__ import annotations

import functools
import logging
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import numpy as np
from torch.fx import GraphModule, Node

from ...cost.simulator import Timeline
from ...graph.edit import copied
from ...graph.liveness import Live, memory_bytes, moments
from ...graph.nested import graphs_of
from ...graph.node_kinds import is_source, wait_of
from ...graph.phase import phase_of
from ...graph.program import Program
from ...graph.resident import resident
from ...graph.segments import Segments
from .._context import Context, context_of
from .._pass import Pass
from ..prefetch import Bound, Run, UnitSource, early, few_alive, sources_in
from ..tile_logits import heads_of, tile_logits
from .decision import Choice
from .drops import AGAIN, GATHERED, OFFLOADED, activations, all_of, drops_of, least_of, positions_in
from .eviction import Drop, cheapest
from .hoists import fitting, of_bodies

log = logging.getLogger("zerofn")
TRIES = 8  # schedules to try before giving up
PAGE = 4096  # bytes: a budget of this much less than the least one that is named does not do
SHORT = 0.01  # of a step's time: a smaller gain is not worth another schedule
Schedule = Callable[[Program], None]


def within(program: Program, budget: int, schedule: Schedule, room: float, tiling: bool = True) -> list[Choice]:
    """Return decisions for each of a program's `graphs` that keep the device's memory within `budget` bytes: with the
    share `room` of it left free if any schedule reaches that, else without.

    With ample memory every unit is gathered once, nothing is recomputed and logits are whole. `tiling`: whether the
    passes can compute logits in tiles. Where that is so, the same search runs with all heads in tiles, too, unless they
    alone would take longer. Raises `OverBudget` if every schedule needs more. `schedule` must be the same on all ranks.
    """
    heads = [frozenset(heads_of(gm.graph) if tiling else ()) for gm in graphs(program.gm)]
    searches = [_Search(program, schedule, _bytes_of)]
    limits = int(budget / (1 + room)), budget
    if any(heads) and searches[0].whole.peak > limits[0]:
        searches.append(_Search(program, schedule, _bytes_of, heads))
    for limit in limits:
        best: _Attempt | None = None
        for search in searches:
            if best is None or search.whole.run.seconds < best.run.seconds:
                found = [x for x in (best, search.fastest(limit)) if x is not None]
                best = min(found, key=lambda x: x.run.seconds, default=None)
        if best is not None:
            return best.choices
    least = min((search.least(room) for search in searches), key=lambda x: x.peak)
    if least.peak <= budget:
        return least.choices
    raise OverBudget(
        least.peak,
        (
            f"{program.name} cannot be scheduled within {budget:,} bytes. It needs at least {least.peak:,} bytes. To "
            "need less, use fewer rows per step, more microbatches (zerofn.accumulate), stage 3, offloaded state, "
            "moments='8bit', or more ranks."
        ),
    )


def recomputed(program: Program, how: str, schedule: Schedule) -> list[Choice]:
    """Return decisions about which activations the backward pass recomputes.

    "full" keeps only the first values of each segment, and all of the last segment. "auto" recomputes the cheapest
    activations until the saved ones take half of the memory. Without activations there is nothing to decide.
    `schedule` must be the same on all ranks.
    """
    search = _Search(program, schedule, lambda live: live["activations"])
    names = [
        frozenset(x.name for x in parts.activations if not parts.is_last(x))
        for parts in (Segments(gm.graph) for gm in search.graphs)
    ]
    if not any(names):
        log.info("%s: remat=%r changes nothing: no activation is kept that could be computed again.", program.name, how)
        return [Choice() for _ in search.graphs]
    full = [Choice(dropped) for dropped in names]
    if how == "full":
        return full
    whole = search.attempt([Choice() for _ in search.graphs])
    drops = [list(activations(search.context.lanes(), Segments(gm.graph), x)) for gm, x in search.places(whole)]
    found = search.fit(whole, drops, whole.peak // 2, lambda taken: _choice(taken)._replace(cuts=None, starts=None))
    return found.choices if found is not None else full


def beside(program: Program, schedule: Schedule) -> list[Choice]:
    """Return decisions that take no more memory than none: units that fit beside everything else stay gathered through
    all microbatches. `schedule` must be the same on all ranks.
    """
    search = _Search(program, schedule, _bytes_of)
    plain = search.attempt([Choice() for _ in search.graphs])
    return search.hoisted(plain, plain.peak).choices


class OverBudget(MemoryError):
    """No schedule fits the budget. `least`: bytes that would be enough."""

    def __init__(self, least: int, message: str) -> None:
        super().__init__(message)
        self.least = least


@dataclass(frozen=True)
class _Levels:
    """A scheduled graph, and the bytes on the device at each of its nodes."""

    gm: GraphModule
    level: list[int]
    context: Context
    _runs: dict[float, Run] = field(default_factory=dict)

    def early(self, limit: float) -> Run:
        """Return a run that starts gathers as early as `limit` allows, with static buffers no larger than necessary."""
        if limit not in self._runs:
            sources, few = self._gathers
            whole = Bound(np.array(self.level, dtype=np.int64), limit)
            self._runs[limit] = early(self.gm, self.context.lanes(), sources, whole, few)
        return self._runs[limit]

    @functools.cached_property
    def _gathers(self) -> tuple[list[UnitSource], Bound]:
        sources = sources_in(self.gm.graph)
        return sources, few_alive(self.gm, sources)


@dataclass(frozen=True)
class _Attempt:
    """Decisions for a program's graphs, and the resulting schedules."""

    choices: list[Choice]
    graphs: list[_Levels]

    @property
    def peak(self) -> int:
        """The most bytes at one time."""
        return max(max(x.level) for x in self.graphs)

    @functools.cached_property
    def run(self) -> Timeline:
        """Return the simulated step."""
        return self.graphs[-1].context.timeline(self.graphs[-1].gm)


def _bytes_of(live: Live) -> int:
    return sum(live.values())


class _Search:
    """Schedules of one program with different decisions. `weigh` turns bytes by kind into bytes. `tiled`: for each
    graph, the heads whose logits come in tiles in all of these schedules.
    """

    def __init__(
        self, program: Program, schedule: Schedule, weigh: Callable[[Live], int], tiled: Sequence[frozenset[str]] = ()
    ) -> None:
        self._program, self._schedule, self._weigh = program, schedule, weigh
        self._tiled, shown = tiled or [frozenset()] * len(graphs(program.gm)), program
        if any(tiled):
            shown = attempted(program, self._with_tiles([Choice() for _ in self._tiled]))
            Pass(tile_logits, "body")(shown)
        self.graphs, self.context = graphs(shown.gm), context_of(program)
        self._hoists = of_bodies(shown.gm)
        self._attempts: dict[tuple[Choice, ...], _Attempt] = {}

    def _with_tiles(self, choices: list[Choice]) -> list[Choice]:
        return [x._replace(tiled=names) for x, names in zip(choices, self._tiled, strict=True)]

    @functools.cached_property
    def whole(self) -> _Attempt:
        """The schedule that drops nothing."""
        return self.attempt([_choice([]) for _ in self.graphs])

    @functools.cached_property
    def _drops(self) -> list[list[Drop]]:
        return [list(drops_of(gm, self.context.lanes(), where)) for gm, where in self.places(self.whole)]

    @functools.cached_property
    def _ways(self) -> list[_Attempt]:
        """Attempts to use when `fit` finds nothing: one with the least memory, and two that drop every value and prefer
        to recompute or to offload it.
        """
        found = zip(self._drops, self.whole.graphs, strict=True)
        chosen = [[least_of(x.level, drops) for drops, x in found]]
        chosen += ([all_of(drops, how) for drops in self._drops] for how in (AGAIN, OFFLOADED))
        choices = [list(map(_choice, way)) for way in chosen]
        return [self.attempt(x) for k, x in enumerate(choices) if x not in choices[:k]]

    def fastest(self, limit: int) -> _Attempt | None:
        """Return the fastest attempt found within a budget, None if there is none."""
        if self.whole.peak <= limit:
            return self.ahead(self.hoisted(self.whole, limit), limit)
        found = self.fit(self.whole, self._drops, limit, _choice)
        if found is not None:
            return self.soonest(found, limit)
        fast = [self.ahead(self.hoisted(x, limit), limit) for x in self._ways if x.peak <= limit]
        return min(fast, key=lambda x: x.run.seconds, default=None)

    def attempt(self, choices: list[Choice]) -> _Attempt:
        """Return the program scheduled with one decision for each graph."""
        choices = self._with_tiles(choices)
        if tuple(choices) not in self._attempts:
            self._attempts[tuple(choices)] = self._scheduled(choices)
        return self._attempts[tuple(choices)]

    def _scheduled(self, choices: list[Choice]) -> _Attempt:
        tried = attempted(self._program, choices)
        self._schedule(tried)
        most: dict[Node, int] = defaultdict(int)
        for node, live in moments(tried.gm, resident(tried).device):
            most[node] = max(most[node], self._weigh(live))
        levels = ([most[n] for n in gm.graph.nodes] for gm in graphs(tried.gm))
        return _Attempt(choices, [_Levels(gm, x, self.context) for gm, x in zip(graphs(tried.gm), levels, strict=True)])

    def pairs(self, attempt: _Attempt) -> Iterator[tuple[GraphModule, _Levels]]:
        """Yield each graph with its scheduled form."""
        return zip(self.graphs, attempt.graphs, strict=True)

    def places(self, attempt: _Attempt) -> Iterator[tuple[GraphModule, dict[Node, int]]]:
        """Yield each graph with its nodes' positions in the scheduled form."""
        return ((gm, positions_in(gm.graph, x.gm.graph)) for gm, x in self.pairs(attempt))

    def fit(
        self, whole: _Attempt, drops: list[list[Drop]], budget: int, choice: Callable[[list[Drop]], Choice]
    ) -> _Attempt | None:
        """Return an attempt within the budget that uses the cheapest of these drops; None if there is none.

        Scheduling adds bytes that are known only afterwards: the next try aims that much lower.
        """
        target, less, last, num_tries = budget, 0, whole, 0
        while num_tries < TRIES:
            chosen = [cheapest(x.level, found, target) for found, x in zip(drops, whole.graphs, strict=True)]
            if any(left > target for _, left in chosen):
                return None
            choices = self._with_tiles([choice(taken) for taken, _ in chosen])
            tried = last
            if choices != last.choices:
                tried, num_tries = self.attempt(choices), num_tries + 1
            if tried.peak <= budget:
                return tried
            less = tried.peak - budget if tried.peak < last.peak else max(tried.peak - budget, 2 * less)
            target, last = target - less, tried
        return None

    def least(self, room: float) -> _Attempt:
        """Return the attempt with the least memory, whatever the budget is: from known ones, bisect for a budget that
        `fit` reaches while it does not reach one of `PAGE` bytes less.
        """

        def fit(budget: int) -> _Attempt | None:
            return self.fit(self.whole, self._drops, budget, _choice)

        def reached(budget: int) -> _Attempt | None:
            return fit(int(budget / (1 + room))) or fit(budget)

        found, low = min([self.whole, *self._ways], key=lambda x: x.peak), 0
        while found.peak - low > PAGE:
            middle = (low + found.peak) // 2
            tried = reached(middle)
            found, low = (tried, low) if tried else (found, middle)
        while tried := reached(found.peak - PAGE):
            found = tried
        return found

    def ahead(self, found: _Attempt, budget: int) -> _Attempt:
        """Return the attempt with gathers as early as links and the budget allow."""
        limit, less = budget, 0
        for _ in range(TRIES):
            starts = [_starts(x, gm, limit) for gm, x in self.pairs(found)]
            if not any(starts):
                break
            tried = self.attempt([x._replace(starts=names) for x, names in zip(found.choices, starts, strict=True)])
            if tried.peak <= budget:
                return tried
            less = max(tried.peak - budget, 2 * less)
            limit -= less
        return found

    def hoisted(self, found: _Attempt, limit: int) -> _Attempt:
        """Return the attempt with as many units gathered once for all microbatches as `limit` allows."""
        if not any(self._hoists.values()):
            return found
        aim = limit
        for _ in range(TRIES):
            names = [fitting(x.gm, x.level, self._hoists.get(gm, ()), aim) for gm, x in self.pairs(found)]
            if not any(names):
                break
            choices = [x._replace(hoisted=frozenset(each)) for x, each in zip(found.choices, names, strict=True)]
            tried = self.attempt(choices)
            if tried.peak <= limit:
                return tried
            aim -= tried.peak - limit
        return found

    def soonest(self, found: _Attempt, budget: int) -> _Attempt:
        """Return the fastest of these attempts: this one, with units gathered once for all microbatches where there is
        room; one that drops more to make room for all of them; each with early gathers; and one that drops more to make
        room for two units ahead.
        """
        first = self.ahead(found, budget)
        if any(self._hoists.values()):
            more = sum(memory_bytes(x.meta["val"]) for gathers in self._hoists.values() for x in gathers)
            roomy = self.fit(self.whole, self._drops, budget - more, _choice)
            ways = [self.ahead(self.hoisted(x, budget), budget) for x in (found, roomy) if x is not None]
            first = min(*ways, first, key=lambda x: x.run.seconds)
        sizes = sorted(x.nbytes for gm in self.graphs for x in sources_in(gm.graph))
        longer = [x.early(budget).seconds / x.early(math.inf).seconds for x in found.graphs]
        if not sizes or max(longer) <= 1 + SHORT:
            return first
        other = self.fit(self.whole, self._drops, budget - 2 * sizes[len(sizes) // 2], _choice)
        if other is None:
            return first
        return min(first, self.ahead(other, budget), key=lambda x: x.run.seconds)


def attempted(program: Program, choices: Sequence[Choice]) -> Program:
    """Return a copy of a prepared program with one decision for each graph."""
    copy = copied(program.gm)
    context, timings = context_of(program).decided(graphs(copy), choices), dict(program.timings)
    return replace(program, gm=copy, context=context, kept=[], buffers=[], drive_space=[], timings=timings)


def graphs(gm: GraphModule) -> list[GraphModule]:
    """Return the bodies of all loops, then the step."""
    return [*graphs_of(gm)[1:], gm]


def _choice(drops: list[Drop]) -> Choice:
    """Return the decisions for these drops, with every gather at its first use."""
    keys: dict[str, set[Any]] = {how: set() for how in (AGAIN, GATHERED, OFFLOADED)}
    for drop in drops:
        how, key = cast(tuple[str, Any], drop.key)
        keys[how].add(key)
    return Choice(frozenset(keys[AGAIN]), frozenset(keys[GATHERED]), frozenset(), frozenset(keys[OFFLOADED]))


def _starts(scheduled: _Levels, gm: GraphModule, limit: float) -> frozenset[tuple[str, str]]:
    """Return (gather, the node before which it may start) by name, using only nodes that all ranks have."""
    graph, starts = scheduled.gm.graph, scheduled.early(limit).starts
    known, waits = {n.name for n in gm.graph.nodes if phase_of(n)}, {wait_of(n) for n in starts if is_source(n)}
    nodes = [n if n in waits or phase_of(n) and n.name in known else None for n in graph.nodes]
    before = {start: next(filter(None, nodes[at:])) for start, at in starts.items()}
    return frozenset((start.name, node.name) for start, node in before.items() if node is not wait_of(start))
