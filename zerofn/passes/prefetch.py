"""Gathers and reads start ahead of their use, as early as links and memory allow."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from torch.fx import Graph, GraphModule, Node

from ..graph.alias import last_uses, positions, roots, written_before
from ..graph.cost import moved
from ..graph.edit import CASTS, DECODES, UPDATE, clean, fetched, is_fetch, is_source, wait_of
from ..graph.liveness import complete_values, memory_bytes
from ..timeline import COMPUTE, lanes_of
from .choice import choice_of
from .regather import ALIVE

UNDER_WAY = 2  # on one link: one that goes on, and one that follows at once


def prefetch(gm: GraphModule) -> GraphModule:
    """Start every gather, with what prepares its piece, as soon as a simulated run has its link free, and the gathered
    units that are there, and not yet used for the last time, take no more than three that follow each other do; where
    starts were chosen, there. Then every read of what is computed with in the same way. None before what it needs is
    there, nor before the one ahead of it. Moves are local, so the order of transfers is the same on every rank.
    """
    names = choice_of(gm).starts
    gathers = sources_in(gm.graph)
    _move(gm.graph, gathers, _in_time(gm, gathers) if names is None else _chosen(gm.graph, names))
    reads = _found(gm.graph, lambda n: is_fetch(n) and not n.meta.get(UPDATE) and not is_source(n))
    _move(gm.graph, reads, _in_time(gm, reads))
    return clean(gm)


def _in_time(gm: GraphModule, sources: Sequence[Source]) -> dict[Node, int]:
    """Gather -> the position of the node before which it starts, where nothing was chosen."""
    return early(gm, sources, few_alive(gm, sources)).starts if sources else {}


class Source(NamedTuple):
    """A gather, or a read. `chain`: what moves with it, itself the last; `at`: where they are, `earliest`: where they
    may be, as positions."""

    start: Node
    chain: list[Node]
    at: int
    earliest: int
    nbytes: int


def sources_in(graph: Graph) -> list[Source]:
    """The gathers of a graph, and reads where nothing is gathered, in order."""
    return _found(graph, is_source)


class Bound(NamedTuple):
    """Bytes at each node of a graph, and how many may be there."""

    level: npt.NDArray[np.int64]
    limit: float


class Run(NamedTuple):
    """`starts`: gather -> position of the node before which it may start; `seconds` that the run takes."""

    starts: dict[Node, int]
    seconds: float


def early(gm: GraphModule, sources: Sequence[Source], *bounds: Bound) -> Run:
    """A simulated run with gathers as early as they may be: no more than `UNDER_WAY` go on at a time on a link, and
    no level, which is that of gathers that start where they are used, grows beyond its limit."""
    complete_values(gm.graph)
    lanes, root = lanes_of(gm), roots(gm.graph)
    bounds = tuple(Bound(level.copy(), limit) for level, limit in bounds)
    inside = {node for x in sources for node in x.chain}
    ends: defaultdict[str, list[float]] = defaultdict(lambda: [0.0] * UNDER_WAY)  # of what a link has carried
    todo, starts = iter(sources), {}
    x, least = _next(todo, bounds)
    for at, node in enumerate(gm.graph.nodes):
        while x is not None and (at == x.at or at >= least and ends[_lane(x)][-UNDER_WAY] <= lanes.free[COMPUTE]):
            for each in x.chain:
                if each is x.start or not is_fetch(each):  # that will have come
                    lanes.step(each, root)
            ends[_lane(x)].append(lanes.free[_lane(x)])
            for level, _ in bounds:
                level[at : x.at] += x.nbytes
            starts[x.start] = at
            x, least = _next(todo, bounds)
        if node not in inside:
            lanes.step(node, root)
    return Run(starts, lanes.free[COMPUTE])


def _next(todo: Iterator[Source], bounds: Sequence[Bound]) -> tuple[Source | None, int]:
    """The source that comes next, and from where on it may start for memory's sake."""
    x = next(todo, None)
    if x is None:
        return None, 0
    full = [np.flatnonzero(level[x.earliest : x.at] + x.nbytes > limit) for level, limit in bounds]
    return x, x.earliest + max(int(found[-1]) + 1 if found.size else 0 for found in full)


def _lane(x: Source) -> str:
    transfer = moved(x.start)
    assert transfer is not None
    return transfer.how


def _move(graph: Graph, sources: Sequence[Source], starts: dict[Node, int]) -> None:
    """Put each before the node at its position in `starts`, or where it may be first; behind the one before it."""
    nodes, at = list(graph.nodes), 0
    inside = {node for x in sources for node in x.chain}
    for x in sources:
        at = max(at, min(x.at, max(x.earliest, starts.get(x.start, x.at))))
        while at < x.at and nodes[at] in inside:  # behind those before it
            at += 1
        if at < x.at:
            for node in x.chain:
                nodes[at].prepend(node)


def _chosen(graph: Graph, names: frozenset[tuple[str, str]]) -> dict[Node, int]:
    """Gather -> the position that was chosen, by names."""
    before, nodes = dict(names), {n.name: k for k, n in enumerate(graph.nodes)}
    return {n: nodes[before[n.name]] for n in graph.nodes if before.get(n.name) in nodes}


def _found(graph: Graph, wanted: Callable[[Node], bool]) -> list[Source]:
    where = positions(graph)
    writer = written_before(graph, where, roots(graph))
    first = sum(n.op == "placeholder" for n in graph.nodes)
    out = []
    for start in filter(wanted, graph.nodes):
        chain = _chain(start, where)
        inputs = (*(i for node in chain for i in node.all_input_nodes), *(writer.get(node) for node in chain))
        needed = [where[i] for i in inputs if i is not None and i not in chain]
        at, earliest = where[chain[0]], max(first, *(k + 1 for k in needed))
        out.append(Source(start, chain, at, min(at, earliest), memory_bytes(start.meta["val"])))
    return out


def _chain(start: Node, where: dict[Node, int]) -> list[Node]:
    """A gather and what prepares its piece, nobody else reading that: what is read, decoded and cast."""
    found, todo = [start], [start]
    while todo:
        for node in todo.pop().all_input_nodes:
            prepares = node.target in CASTS or node.target in DECODES or fetched(node) or is_fetch(node)
            if prepares and len(node.users) == 1:
                found.append(node)
                todo.append(node)
    return sorted(found, key=where.__getitem__)


def few_alive(gm: GraphModule, sources: Sequence[Source]) -> Bound:
    """That gathered units take no more than three that follow each other do, or than they do anyhow."""
    where, root = positions(gm.graph), roots(gm.graph)
    last = last_uses(gm.graph, where, root)
    level = np.zeros(len(where), dtype=np.int64)
    for x in sources:
        level[where[x.start] : last[root[wait_of(x.start)]] + 1] += x.nbytes
    sizes = [x.nbytes for x in sources]
    most = max((sum(sizes[k : k + ALIVE]) for k in range(len(sizes))), default=0)
    return Bound(level, max(most, int(level.max(initial=0))))
