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
from torch.fx import Graph, GraphModule, Node

from ...cost.op_cost import UP, Traffic, moved
from ...cost.simulator import Lanes, Timeline
from ...dry_run.fake_machine import is_host
from ...graph.alias import positions
from ...graph.edit import copied, weight_chain
from ...graph.liveness import Live, memory_bytes, moments
from ...graph.nested import graphs_of
from ...graph.node_kinds import is_source, wait_of
from ...graph.phase import FORWARD, phase_of
from ...graph.program import Program, tensor_of
from ...graph.resident import resident
from ...graph.segments import Segments
from .._context import Context, context_of
from ..offload_activations import stays
from ..prefetch import Bound, Run, UnitSource, early, few_alive, sources_in
from ..reshard import num_others, uses_of_gathers
from .decision import Choice
from .eviction import Drop, cheapest
from .hoists import fitting, of_bodies

log = logging.getLogger("zerofn")
TRIES = 8  # schedules to try before giving up
PAGE = 4096  # bytes: a budget of this much less than the least one that is named does not do
SHORT = 0.01  # of a step's time: a smaller gain is not worth another schedule
# The share of the forward pass that is assumed to hide transfers. It is less than 1, because transfers come in bursts
# and devices may be faster than simulated. On a simulated H100, GPT-2 of 6 layers of 2,048 in half of its memory took
# 172.6 ms with 1, 163.6 with 0.25, and 163.7 without transfers.
HIDDEN = 0.25
AGAIN, GATHERED, OFFLOADED = "recomputed", "gathered again", "copied back"  # how a dropped value comes back
Schedule = Callable[[Program], None]


def within(program: Program, budget: int, schedule: Schedule, room: float) -> list[Choice]:
    """Return decisions for each of a program's `graphs` that keep the device's memory within `budget` bytes: with the
    share `room` of it left free if any schedule reaches that, else without.

    With ample memory every unit is gathered once and nothing is recomputed. Raises `OverBudget` if every schedule
    needs more. `schedule` must be the same on all ranks.
    """
    search = _Search(program, schedule, lambda live: sum(live.values()))
    whole = search.attempt([_choice([]) for _ in search.graphs])
    drops: list[list[Drop]] = []
    ways: list[_Attempt] = []
    for limit in (int(budget / (1 + room)), budget):
        if whole.peak <= limit:
            return search.ahead(search.hoisted(whole, limit), limit).choices
        drops = drops or [list(_drops(gm, search.context.lanes(), where)) for gm, where in search.places(whole)]
        found = search.fit(whole, drops, limit, _choice)
        if found is not None:
            return search.soonest(found, whole, drops, limit)
        ways = ways or search.ways(whole, drops)
        fast = [search.ahead(search.hoisted(x, limit), limit) for x in ways if x.peak <= limit]
        if fast:
            return min(fast, key=lambda x: x.run.seconds).choices
    least = search.least([whole, *ways], lambda limit: search.fit(whole, drops, limit, _choice), room)
    if least.peak <= budget:
        return least.choices
    raise OverBudget(
        least.peak,
        (
            f"{program.name} cannot be scheduled within {budget:,} bytes: the least that it takes is {least.peak:,}. "
            "To take less, use fewer rows a step, more microbatches (zerofn.accumulate), stage 3, offloaded state, "
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
    drops = [list(_activations(search.context.lanes(), Segments(gm.graph), x)) for gm, x in search.places(whole)]
    found = search.fit(whole, drops, whole.peak // 2, lambda taken: _choice(taken)._replace(cuts=None, starts=None))
    return found.choices if found is not None else full


def beside(program: Program, schedule: Schedule) -> list[Choice]:
    """Return decisions that take no more memory than none: units that fit beside everything else stay gathered through
    all microbatches. `schedule` must be the same on all ranks.
    """
    search = _Search(program, schedule, lambda live: sum(live.values()))
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


class _Search:
    """Schedules of one program with different decisions. `weigh` turns bytes by kind into bytes."""

    def __init__(self, program: Program, schedule: Schedule, weigh: Callable[[Live], int]) -> None:
        self._program, self._schedule, self._weigh = program, schedule, weigh
        self.graphs, self.context = graphs(program.gm), context_of(program)
        self._hoists = of_bodies(program.gm)
        self._attempts: dict[tuple[Choice, ...], _Attempt] = {}

    def attempt(self, choices: list[Choice]) -> _Attempt:
        """Return the program scheduled with one decision for each graph."""
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
        return ((gm, _positions_in(gm.graph, x.gm.graph)) for gm, x in self.pairs(attempt))

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
            choices = [choice(taken) for taken, _ in chosen]
            tried = last
            if choices != last.choices:
                tried, num_tries = self.attempt(choices), num_tries + 1
            if tried.peak <= budget:
                return tried
            less = tried.peak - budget if tried.peak < last.peak else max(tried.peak - budget, 2 * less)
            target, last = target - less, tried
        return None

    def ways(self, whole: _Attempt, drops: list[list[Drop]]) -> list[_Attempt]:
        """Return attempts to use when `fit` finds nothing: one with the least memory, and two that drop every value and
        prefer to recompute or to offload it.
        """
        chosen = [[_least(x.level, found) for found, x in zip(drops, whole.graphs, strict=True)]]
        chosen += ([_all_of(found, how) for found in drops] for how in (AGAIN, OFFLOADED))
        choices = [list(map(_choice, way)) for way in chosen]
        return [self.attempt(x) for k, x in enumerate(choices) if x not in choices[:k]]

    def least(self, known: Sequence[_Attempt], fit: Callable[[int], _Attempt | None], room: float) -> _Attempt:
        """Return the attempt with the least memory, whatever the budget is: from `known` ones, bisect for a budget
        that `fit` reaches while it does not reach one of `PAGE` bytes less.
        """

        def reached(budget: int) -> _Attempt | None:
            return fit(int(budget / (1 + room))) or fit(budget)

        found, low = min(known, key=lambda x: x.peak), 0
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

    def soonest(self, found: _Attempt, whole: _Attempt, drops: list[list[Drop]], budget: int) -> list[Choice]:
        """Return the fastest of these attempts: this one, with units gathered once for all microbatches where there is
        room; one that drops more to make room for all of them; each with early gathers; and one that drops more to make
        room for two units ahead.
        """
        first = self.ahead(found, budget)
        if any(self._hoists.values()):
            more = sum(memory_bytes(x.meta["val"]) for gathers in self._hoists.values() for x in gathers)
            roomy = self.fit(whole, drops, budget - more, _choice)
            ways = [self.ahead(self.hoisted(x, budget), budget) for x in (found, roomy) if x is not None]
            first = min(*ways, first, key=lambda x: x.run.seconds)
        sizes = sorted(x.nbytes for gm in self.graphs for x in sources_in(gm.graph))
        longer = [x.early(budget).seconds / x.early(math.inf).seconds for x in found.graphs]
        if not sizes or max(longer) <= 1 + SHORT:
            return first.choices
        other = self.fit(whole, drops, budget - 2 * sizes[len(sizes) // 2], _choice)
        if other is None:
            return first.choices
        return min(first, self.ahead(other, budget), key=lambda x: x.run.seconds).choices


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


def _activations(lanes: Lanes, segments: Segments, where: dict[Node, int]) -> Iterator[Drop]:
    """Yield the activations that may be recomputed, at positions of the scheduled graph."""
    for memory in segments.activations:
        last, first = segments.gap(memory)
        seconds = sum(map(lanes.cost, segments.missing(memory, {memory})))
        nbytes = memory_bytes(memory.meta["val"])
        if nbytes:  # batch norm in eval mode saves two empty tensors
            yield Drop((AGAIN, memory.name), where[last], where[first], nbytes, seconds, memory.name)


def _drops(gm: GraphModule, lanes: Lanes, where: dict[Node, int]) -> Iterator[Drop]:
    """Yield every value that may be dropped, once for each way to bring it back."""
    segments = Segments(gm.graph)
    again = list(_activations(lanes, segments, where))
    yield from again
    yield from _offloads(gm, lanes, where, again, segments.gathered_again)
    yield from _gathers(gm, lanes, where)


def _offloads(
    gm: GraphModule, lanes: Lanes, where: dict[Node, int], computed: list[Drop], gone: set[Node]
) -> Iterator[Drop]:
    """Yield activations that may wait in host memory, at positions of the scheduled graph; none where models compute
    on the host, and nothing that is `gone` anyway.

    Transfers that fit into the share `HIDDEN` of the forward pass cost only the time that device memory takes to read
    or write. The activations that are the most expensive to recompute get that share. All other transfers are assumed
    to stall the device, in both directions.
    """
    found = [x for x in stays(gm.graph) if x.memory not in gone and not is_host(tensor_of(x.memory).device)]  # type: ignore[union-attr]
    again = {drop.of: drop.seconds / drop.nbytes for drop in computed}
    free = HIDDEN * sum(lanes.cost(n) for n in gm.graph.nodes if phase_of(n) == FORWARD) if found else 0.0
    for x in sorted(found, key=lambda x: -again.get(x.memory.name, 0.0)):
        nbytes = memory_bytes(x.memory.meta["val"])
        seconds = lanes.seconds_of(UP, nbytes)
        free -= seconds
        cost = nbytes / lanes.machine.memory_rate if free > 0 else seconds
        yield Drop((OFFLOADED, x.memory.name), where[x.last], where[x.first], nbytes, 2 * cost, x.memory.name)


def _least(level: list[int], drops: list[Drop]) -> list[Drop]:
    """Return the drops that give the lowest peak."""
    _, left = cheapest(level, drops, 0)
    return cheapest(level, drops, left)[0]


def _all_of(drops: list[Drop], how: str) -> list[Drop]:
    """Return one drop of every value; if a value has several, prefer the one that brings it back in this way."""
    first = {drop.of or drop.key: drop for drop in sorted(drops, key=lambda x: x.key[0] == how)}  # type: ignore[index]
    return [drop for drop in drops if first[drop.of or drop.key] is drop]


def _gathers(gm: GraphModule, lanes: Lanes, where: dict[Node, int]) -> Iterator[Drop]:
    """Yield units that may be gathered again, between two uses that have uses of another unit in between."""
    uses = uses_of_gathers(gm.graph, weight_chain(gm.graph), positions(gm.graph))
    timeline = sorted((where[u], k) for k, found in enumerate(uses.values()) for u in found)
    for k, (start, found) in enumerate(uses.items()):
        for before, after in zip(found, found[1:], strict=False):
            if num_others(k, timeline, where[before], where[after]):
                nbytes = tensor_of(start).nbytes  # type: ignore[union-attr]
                key = (start.name, before.name)
                _, seconds = lanes.transfer(start, cast(Traffic, moved(start)))
                yield Drop((GATHERED, key), where[before], where[after], nbytes, seconds)


def _positions_in(graph: Graph, final: Graph) -> dict[Node, int]:
    """Map each node of a graph to its position in the scheduled graph; a node that was replaced takes the position of
    the one before it.
    """
    there = {node.name: k for k, node in enumerate(final.nodes)}
    out: dict[Node, int] = {}
    at = 0
    for node in graph.nodes:
        at = out[node] = there.get(node.name, at)
    return out
