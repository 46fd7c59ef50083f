"""Schedules that keep to a budget of memory: which values are kept, and which are dropped and brought back."""

from __future__ import annotations

import functools
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import numpy as np
from torch.fx import Graph, GraphModule, Node

from ...cost.op_cost import UP, Moved, moved
from ...cost.simulator import Timeline, lanes_of, simulated
from ...dry_run.fake_machine import is_host
from ...graph.alias import positions
from ...graph.edit import bodies, copied, weight_chain
from ...graph.liveness import Live, memory_bytes, moments
from ...graph.node_kinds import is_source, wait_of
from ...graph.phase import FORWARD, phase_of
from ...graph.program import Program, tensor_of
from ...graph.resident import resident
from ...graph.segments import Segments
from ..offload_activations import stays
from ..prefetch import Bound, Run, Source, early, few_alive, sources_in
from ..reshard import num_others, uses_of_gathers
from .decision import Choice, choose
from .eviction import Drop, cheapest

TRIES = 8  # schedules that are made before a budget is given up
SHORT = 0.01  # of a step's time: so much is not worth more schedules
# Transfers come in bursts, and devices may be faster than simulated. On a simulated H100, GPT-2 of 6 layers of 2,048 in
# half of its memory took 172.6 ms with all of the time, 163.6 with a quarter, 163.7 without transfers.
HIDDEN = 0.25
AGAIN, GATHERED, STASHED = "computed again", "gathered again", "brought back"  # how a value that is dropped comes back
Schedule = Callable[[Program], None]


def within(program: Program, budgets: Sequence[int], schedule: Schedule) -> list[Choice]:
    """What to choose, for each of a program's `graphs`, such that no more bytes are alive on the device at any time
    than the first of `budgets` that any schedule keeps to. With ample memory every unit is gathered once and nothing is
    computed again.

    Raises `MemoryError` below what the least schedule needs. `schedule` must be the same on all ranks.
    """
    search = _Search(program, schedule, lambda live: sum(live.values()))
    whole = search.attempt([_choice([]) for _ in search.graphs])
    drops: list[list[Drop]] = []
    ways: list[_Attempt] = []
    for budget in budgets:
        if whole.peak <= budget:
            return search.ahead(whole, budget).choices
        drops = drops or [list(_drops(gm, _positions_in(gm.graph, x.gm.graph))) for gm, x in search.pairs(whole)]
        found = search.fit(whole, drops, budget, _choice)
        if found is not None:
            return search.soonest(found, whole, drops, budget)
        ways = ways or search.ways(whole, drops)
        fitting = [search.ahead(x, budget) for x in ways if x.peak <= budget]
        if fitting:
            return min(fitting, key=lambda x: x.run.seconds).choices
    least = search.least
    raise OverBudget(
        least,
        (
            f"{program.name} cannot be scheduled within {budgets[-1]:,} bytes: the least that it takes is {least:,}. "
            "It takes less with fewer rows a step, or more microbatches (zerofn.accumulate), at stage 3, with state "
            "offloaded or moments='8bit', on more ranks."
        ),
    )


def recomputed(program: Program, how: str, schedule: Schedule) -> list[Choice]:
    """What to choose for activations to be computed again for the backward pass: all but what segments begin with, and
    the last one's ("full"), or those for which it costs least, until what is kept takes half of the memory ("auto").

    Raises `ValueError` where there are none. `schedule` must be the same on all ranks.
    """
    search = _Search(program, schedule, lambda live: live["activations"])
    names = [
        frozenset(x.name for x in parts.activations if not parts.is_last(x))
        for parts in (Segments(gm.graph) for gm in search.graphs)
    ]
    if not any(names):
        raise ValueError(
            f"compile(remat={how!r}) has no effect: {program.name} keeps nothing for a backward pass that "
            "could be computed again. Leave it out."
        )
    full = [Choice(dropped) for dropped in names]
    if how == "full":
        return full
    whole = search.attempt([Choice() for _ in search.graphs])
    drops = [list(_activations(gm, _positions_in(gm.graph, x.gm.graph))) for gm, x in search.pairs(whole)]
    found = search.fit(whole, drops, whole.peak // 2, lambda taken: _choice(taken)._replace(cuts=None, starts=None))
    return found.choices if found is not None else full


class OverBudget(MemoryError):
    """No schedule keeps to a budget. `least`: bytes that would do."""

    def __init__(self, least: int, message: str) -> None:
        super().__init__(message)
        self.least = least


@dataclass(frozen=True)
class _Levels:
    """A scheduled graph and what weighs at each of its nodes."""

    gm: GraphModule
    level: list[int]
    _runs: dict[float, Run] = field(default_factory=dict)

    def early(self, limit: float) -> Run:
        """A run with gathers as early as `limit` allows, and static buffers that have no more room than there must
        be."""
        if limit not in self._runs:
            sources, few = self._gathers
            whole = Bound(np.array(self.level, dtype=np.int64), limit)
            self._runs[limit] = early(self.gm, sources, whole, few)
        return self._runs[limit]

    @functools.cached_property
    def _gathers(self) -> tuple[list[Source], Bound]:
        sources = sources_in(self.gm.graph)
        return sources, few_alive(self.gm, sources)


@dataclass(frozen=True)
class _Attempt:
    """Choices for a program's graphs, and what these are with them."""

    choices: list[Choice]
    graphs: list[_Levels]

    @property
    def peak(self) -> int:
        """The most that weighs at once."""
        return max(max(x.level) for x in self.graphs)

    @functools.cached_property
    def run(self) -> Timeline:
        """The step, simulated."""
        return simulated(self.graphs[-1].gm)


class _Search:
    """Schedules of a program with other choices, weighed by `weigh`, bytes by kind -> bytes; `least`: the least peak of
    all that were tried."""

    least = 1 << 62

    def __init__(self, program: Program, schedule: Schedule, weigh: Callable[[Live], int]) -> None:
        self._program, self._schedule, self._weigh = program, schedule, weigh
        self.graphs = graphs(program.gm)

    def attempt(self, choices: list[Choice]) -> _Attempt:
        """What comes of a choice for each graph."""
        tried = replace(
            self._program,
            gm=copied(self._program.gm),
            kept=[],
            buffers=[],
            drive_space=[],
            timings=dict(self._program.timings),
        )
        for gm, choice in zip(graphs(tried.gm), choices, strict=True):
            choose(gm, choice)
        self._schedule(tried)
        most: dict[Node, int] = defaultdict(int)
        for node, live in moments(tried.gm, resident(tried).device):
            most[node] = max(most[node], self._weigh(live))
        found = _Attempt(choices, [_Levels(gm, [most[n] for n in gm.graph.nodes]) for gm in graphs(tried.gm)])
        self.least = min(self.least, found.peak)
        return found

    def pairs(self, attempt: _Attempt) -> Iterator[tuple[GraphModule, _Levels]]:
        """Each graph and its scheduled form."""
        return zip(self.graphs, attempt.graphs, strict=True)

    def fit(
        self, whole: _Attempt, drops: list[list[Drop]], budget: int, choice: Callable[[list[Drop]], Choice]
    ) -> _Attempt | None:
        """One within the budget, with the cheapest of these drops; None if there is none. What scheduling adds is known
        afterwards: then it is tried again with so much less."""
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
        """Where `fit` finds nothing: what takes least, and all in one way and in another."""
        chosen = [[_least(x.level, found) for found, x in zip(drops, whole.graphs, strict=True)]]
        chosen += ([_all_of(found, how) for found in drops] for how in (AGAIN, STASHED))
        choices = [list(map(_choice, way)) for way in chosen]
        return [self.attempt(x) for k, x in enumerate(choices) if x not in choices[:k]]

    def ahead(self, found: _Attempt, budget: int) -> _Attempt:
        """The same with gathers as early as links and the budget allow."""
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

    def soonest(self, found: _Attempt, whole: _Attempt, drops: list[list[Drop]], budget: int) -> list[Choice]:
        """What to choose: that, with gathers ahead, or, where these have too little room, what drops more for two of
        them if that takes less time."""
        first = self.ahead(found, budget)
        sizes = sorted(x.nbytes for gm in self.graphs for x in sources_in(gm.graph))
        longer = [x.early(budget).seconds / x.early(math.inf).seconds for x in found.graphs]
        if not sizes or max(longer) <= 1 + SHORT:
            return first.choices
        other = self.fit(whole, drops, budget - 2 * sizes[len(sizes) // 2], _choice)
        if other is None:
            return first.choices
        return min(first, self.ahead(other, budget), key=lambda x: x.run.seconds).choices


def graphs(gm: GraphModule) -> list[GraphModule]:
    """The bodies of all loops, then the step."""
    return [*bodies(gm), gm]


def _choice(drops: list[Drop]) -> Choice:
    """What to do where these are dropped, all units being gathered where they are used."""
    keys: dict[str, set[Any]] = {how: set() for how in (AGAIN, GATHERED, STASHED)}
    for drop in drops:
        how, key = cast(tuple[str, Any], drop.key)
        keys[how].add(key)
    return Choice(frozenset(keys[AGAIN]), frozenset(keys[GATHERED]), frozenset(), frozenset(keys[STASHED]))


def _starts(scheduled: _Levels, gm: GraphModule, limit: float) -> frozenset[tuple[str, str]]:
    """(gather, the node before which it may start), by names; only such nodes as all ranks have."""
    graph, starts = scheduled.gm.graph, scheduled.early(limit).starts
    known, waits = {n.name for n in gm.graph.nodes if phase_of(n)}, {wait_of(n) for n in starts if is_source(n)}
    nodes = [n if n in waits or phase_of(n) and n.name in known else None for n in graph.nodes]
    before = {start: next(filter(None, nodes[at:])) for start, at in starts.items()}
    return frozenset((start.name, node.name) for start, node in before.items() if node is not wait_of(start))


def _activations(gm: GraphModule, where: dict[Node, int]) -> Iterator[Drop]:
    """What may be computed again, at positions of the scheduled graph."""
    segments, lanes = Segments(gm.graph), lanes_of(gm)
    for memory in segments.activations:
        last, first = segments.gap(memory)
        seconds = sum(map(lanes.cost, segments.missing(memory, {memory})))
        nbytes = memory_bytes(memory.meta["val"])
        if nbytes:  # batch norm in eval mode saves two empty tensors
            yield Drop((AGAIN, memory.name), where[last], where[first], nbytes, seconds, memory.name)


def _drops(gm: GraphModule, where: dict[Node, int]) -> Iterator[Drop]:
    """All that may be dropped, and each way to bring it back."""
    again = list(_activations(gm, where))
    yield from again
    yield from _offloads(gm, where, again)
    yield from _gathers(gm, where)


def _offloads(gm: GraphModule, where: dict[Node, int], computed: list[Drop]) -> Iterator[Drop]:
    """What may wait in host memory, at positions of the scheduled graph; nothing where models compute there.

    For a share `HIDDEN` of the time of the forward pass transfers cost no more than the device's memory's own time:
    those of what is dearest to compute again. All others are taken to hold the device up, both ways.
    """
    found = [x for x in stays(gm.graph) if not is_host(tensor_of(x.memory).device)]  # type: ignore[union-attr]
    lanes = lanes_of(gm)
    again = {drop.of: drop.seconds / drop.nbytes for drop in computed}
    free = HIDDEN * sum(lanes.cost(n) for n in gm.graph.nodes if phase_of(n) == FORWARD) if found else 0.0
    for x in sorted(found, key=lambda x: -again.get(x.memory.name, 0.0)):
        nbytes = memory_bytes(x.memory.meta["val"])
        seconds = lanes.seconds_of(UP, nbytes)
        free -= seconds
        cost = nbytes / lanes.machine.memory_rate if free > 0 else seconds
        yield Drop((STASHED, x.memory.name), where[x.last], where[x.first], nbytes, 2 * cost, x.memory.name)


def _least(level: list[int], drops: list[Drop]) -> list[Drop]:
    """What it takes to have the lowest peak."""
    _, left = cheapest(level, drops, 0)
    return cheapest(level, drops, left)[0]


def _all_of(drops: list[Drop], how: str) -> list[Drop]:
    """All, of several of one value that which is brought back so."""
    first = {drop.of or drop.key: drop for drop in sorted(drops, key=lambda x: x.key[0] == how)}  # type: ignore[index]
    return [drop for drop in drops if first[drop.of or drop.key] is drop]


def _gathers(gm: GraphModule, where: dict[Node, int]) -> Iterator[Drop]:
    """What may be gathered again, between uses with another unit's use between them."""
    uses = uses_of_gathers(gm.graph, weight_chain(gm.graph), positions(gm.graph))
    lanes = lanes_of(gm)
    timeline = sorted((where[u], k) for k, found in enumerate(uses.values()) for u in found)
    for k, (start, found) in enumerate(uses.items()):
        for before, after in zip(found, found[1:], strict=False):
            if num_others(k, timeline, where[before], where[after]):
                nbytes = tensor_of(start).nbytes  # type: ignore[union-attr]
                key = (start.name, before.name)
                transfer = cast(Moved, moved(start))
                seconds = lanes.seconds_of(transfer.how, transfer.nbytes)
                yield Drop((GATHERED, key), where[before], where[after], nbytes, seconds)


def _positions_in(graph: Graph, final: Graph) -> dict[Node, int]:
    """Node of a graph -> its place in the scheduled one; of what was replaced there, that of the node before it."""
    there = {node.name: k for k, node in enumerate(final.nodes)}
    out: dict[Node, int] = {}
    at = 0
    for node in graph.nodes:
        at = out[node] = there.get(node.name, at)
    return out
