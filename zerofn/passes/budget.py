"""A schedule that keeps to a budget of memory: which values are kept, and which are dropped and brought back."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from torch.fx import Graph, GraphModule, Node

from ..graph.alias import positions
from ..graph.copies import copied
from ..graph.cost import seconds_of
from ..graph.edit import loops, weight_chain
from ..graph.liveness import moments
from ..graph.program import Program, tensor_of
from ..graph.resident import resident
from ..graph.segments import Segments
from .choice import Choice, choose
from .fit import Drop, cheapest
from .regather import num_others, uses_of_gathers

TRIES = 8  # schedules that are made before a budget is given up
AHEAD = 2  # gathers that may be under way beside the unit that is used
Schedule = Callable[[Program], Program]


def within(program: Program, budget: int, schedule: Schedule) -> Program:
    """The program after `schedule`, its values dropped and brought back such that no more than `budget` bytes are alive
    on the device at any time. With ample memory every unit is gathered once and nothing is computed again.

    Raises `MemoryError` below what the least schedule needs.
    """
    graphs = _graphs(program.gm)
    whole, levels = _attempt(program, [_choice([], AHEAD) for _ in graphs], schedule)
    if _peak(levels) <= budget:
        return whole
    drops = [list(_drops(gm, final, level)) for gm, (final, level) in zip(graphs, levels, strict=True)]
    for ahead in range(AHEAD, -1, -1):
        target = budget
        for _ in range(TRIES):
            chosen = [cheapest(level, found, target) for found, (_, level) in zip(drops, levels, strict=True)]
            if any(left > target for _, left in chosen):
                break
            tried, found = _attempt(program, [_choice(taken, ahead) for taken, _ in chosen], schedule)
            if _peak(found) <= budget:
                return tried
            target -= _peak(found) - budget
    least, tried = _peak(levels), whole
    for ahead in range(AHEAD, -1, -1):
        all_dropped, found = _attempt(program, [_choice(taken, ahead) for taken in drops], schedule)
        if _peak(found) < least:
            least, tried = _peak(found), all_dropped
    if least > budget:
        raise MemoryError(f"{program.name} cannot be scheduled within {budget:,} bytes: the least that it takes is "
                          f"{least:,}.")
    return tried


def _graphs(gm: GraphModule) -> list[GraphModule]:
    """The bodies of loops, then the step."""
    return [*(body for _, body in loops(gm)), gm]


def _attempt(program: Program, choices: list[Choice], schedule: Schedule
             ) -> tuple[Program, list[tuple[Graph, list[int]]]]:
    """The program scheduled with these choices, and its graphs with the bytes that are alive at each of their nodes."""
    tried = replace(program, gm=copied(program.gm), kept=[], arenas=[], timings=dict(program.timings))
    for gm, choice in zip(_graphs(tried.gm), choices, strict=True):
        choose(gm, choice)
    tried = schedule(tried)
    most: dict[Node, int] = defaultdict(int)
    highest = 0
    for moment in moments(tried.gm, resident(tried).device):
        highest = max(highest, moment.nbytes)
        most[moment.node] = max(most[moment.node], moment.nbytes)
    return tried, [(gm.graph, [most[n] for n in gm.graph.nodes]) for gm in _graphs(tried.gm)]


def _peak(levels: list[tuple[Graph, list[int]]]) -> int:
    return max(max(level) for _, level in levels)


def _choice(drops: list[Drop], ahead: int) -> Choice:
    keys: list[Any] = [drop.key for drop in drops]
    return Choice(frozenset(k for k in keys if isinstance(k, str)),
                  frozenset(k for k in keys if not isinstance(k, str)), ahead)


def _drops(gm: GraphModule, final: Graph, level: list[int]) -> Iterator[Drop]:
    """What may be dropped in a graph, at positions of its scheduled form."""
    where = _positions_in(gm.graph, final)
    segments = Segments(gm.graph)
    for memory in segments.activations:
        last, first = segments.gap(memory)
        cost = sum(map(seconds_of, segments.missing(memory, {memory})))
        yield Drop(memory.name, where[last], where[first], tensor_of(memory).untyped_storage().nbytes(), cost)  # type: ignore[union-attr]
    uses = uses_of_gathers(gm.graph, weight_chain(gm.graph), positions(gm.graph))
    timeline = sorted((where[u], k) for k, found in enumerate(uses.values()) for u in found)
    for k, (start, found) in enumerate(uses.items()):
        for before, after in zip(found, found[1:], strict=False):
            if num_others(k, timeline, where[before], where[after]):
                nbytes = tensor_of(start).nbytes  # type: ignore[union-attr]
                yield Drop((start.name, before.name), where[before], where[after], nbytes, seconds_of(start))


def _positions_in(graph: Graph, final: Graph) -> dict[Node, int]:
    """Node of a graph -> its place in the scheduled one; of what was replaced there, that of the node before it."""
    there = {node.name: k for k, node in enumerate(final.nodes)}
    out: dict[Node, int] = {}
    at = 0
    for node in graph.nodes:
        at = out[node] = there.get(node.name, at)
    return out
