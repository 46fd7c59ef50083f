"""Start gathers and drive reads ahead of their use, as early as links and memory allow."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from torch.fx import Graph, GraphModule, Node

from ..cost.op_cost import moved
from ..cost.simulator import COMPUTE, Lanes
from ..graph.alias import last_uses, positions, roots, written_before
from ..graph.edit import clean
from ..graph.liveness import complete_values, memory_bytes
from ..graph.node_kinds import casts, decodes, fetched, is_fetch, is_source, is_start, wait_of
from ._context import Context
from .budget.decision import set_order
from .reshard import ALIVE

UNDER_WAY = 2  # transfers on a link: one that runs, and one that follows without a gap


def prefetch(gm: GraphModule, context: Context) -> None:
    """Move every gather up to where a simulated run can start it, with the operations that prepare its shard.

    Transfers then overlap computation. The simulated run starts a gather when its link is free and at most `ALIVE`
    consecutive units are in memory. Starts that the memory search has chosen replace this rule. A gather's input on a
    drive or the host is read earlier, as soon as that link is free.

    A gather never moves above its inputs or the gather ahead of it. Where ranks' batches have other sizes, runs
    differ, and all take one rank's order of transfers, `context.order`. `sink_gathers` and `reshard` have left each
    gather at its first use, which is its latest position.
    """
    names, sources, order = context.choice.starts, sources_in(gm.graph), context.order
    if names is not None:
        starts = _chosen(gm.graph, names)
    else:
        starts = early(gm, context.lanes(), sources, few_alive(gm, sources)).starts if sources else {}
    if order is not None:
        starts = _ordered(gm.graph, sources, starts, order)
    _move(gm.graph, sources, starts)
    set_order(gm, _order(gm.graph, sources))
    clean(gm)


class UnitSource(NamedTuple):
    """A gather, or a drive read where nothing is gathered.

    `chain`: the nodes that move with it, itself last. `reads`: the reads of what it sends. `at`: its position;
    `earliest`: the first possible one.
    """

    start: Node
    chain: list[Node]
    reads: list[Node]
    at: int
    earliest: int
    nbytes: int


def sources_in(graph: Graph) -> list[UnitSource]:
    """Return the sources of a graph in order."""
    where = positions(graph)
    writer = written_before(graph, where, roots(graph))
    first = sum(n.op == "placeholder" for n in graph.nodes)
    out = []
    for start in filter(is_source, graph.nodes):
        found = _chain(start, where)
        inputs = (*(i for node in found for i in node.all_input_nodes), *(writer.get(node) for node in found))
        needed = [where[i] for i in inputs if i is not None and i not in found]
        reads = [n for n in found if is_fetch(n) and n is not start]
        at, earliest = where[found[0]], max(first, *(k + 1 for k in needed))
        chain = [n for n in found if n not in reads]
        out.append(UnitSource(start, chain, reads, at, min(at, earliest), memory_bytes(start.meta["val"])))
    return out


class Bound(NamedTuple):
    """Bytes at each node of a graph, and the most that are allowed."""

    level: npt.NDArray[np.int64]
    limit: float


class Run(NamedTuple):
    """A simulated run. `starts`: gather, or read for one -> position of the node before which it may start. `seconds`:
    its duration.
    """

    starts: dict[Node, int]
    seconds: float


def early(gm: GraphModule, lanes: Lanes, sources: Sequence[UnitSource], *bounds: Bound) -> Run:
    """Simulate a run on `lanes`, of which nothing has run, with gathers as early as possible.

    A gather starts when its input has been read; meanwhile the reads for the next gather go on. At most `UNDER_WAY`
    transfers are in flight on a link. Each of `bounds` counts memory with gathers at their first use; an earlier start
    may not raise it above its limit.
    """
    complete_values(gm.graph)
    run, todo = _Early(gm, lanes), deque(sources)
    bounds = tuple(Bound(level.copy(), limit) for level, limit in bounds)
    inside = _moving(sources)
    least = _least(todo, bounds)
    for at, node in enumerate(gm.graph.nodes):
        run.read(todo, at)
        while todo and (at >= todo[0].at or at >= least and run.is_ready(todo[0])):
            x = todo.popleft()
            run.gather(x, at)
            for level, _ in bounds:
                level[at : x.at] += x.nbytes
            least = _least(todo, bounds)
            run.read(todo, at)
        if node not in inside:
            run.lanes.step(node, run.root)
    return Run(run.starts, run.lanes.free[COMPUTE])


class _Early:
    """A run in progress, in which gathers and reads start."""

    def __init__(self, gm: GraphModule, lanes: Lanes) -> None:
        self.lanes, self.root = lanes, roots(gm.graph)
        self.starts: dict[Node, int] = {}
        # link -> the times at which its transfers end
        self._ends: defaultdict[str, list[float]] = defaultdict(lambda: [0.0] * UNDER_WAY)

    def is_ready(self, x: UnitSource) -> bool:
        """Return whether a gather's link is free, and its input is in memory."""
        there = all(n in self.starts and self.lanes.done(n) <= self.lanes.free[COMPUTE] for n in x.reads)
        return there and self._is_free(x.start)

    def gather(self, x: UnitSource, at: int) -> None:
        """Start a gather, after the reads that it still needs."""
        for node in (*(n for n in x.reads if n not in self.starts), *x.chain):
            self._step(node, at)

    def read(self, todo: Sequence[UnitSource], at: int) -> None:
        """Start the reads for the next gather."""
        if todo and at >= todo[0].earliest:
            for node in todo[0].reads:
                if node not in self.starts and self._is_free(node):
                    self._step(node, at)

    def _step(self, node: Node, at: int) -> None:
        self.lanes.step(node, self.root)
        transfer = moved(node)
        if transfer is not None:
            lane, _ = self.lanes.transfer(node, transfer)
            self._ends[lane].append(self.lanes.free[lane])
            self.starts[node] = at

    def _is_free(self, node: Node) -> bool:
        transfer = moved(node)
        assert transfer is not None
        lane, _ = self.lanes.transfer(node, transfer)
        return self._ends[lane][-UNDER_WAY] <= self.lanes.free[COMPUTE]


def _moving(sources: Sequence[UnitSource]) -> set[Node]:
    """Return all gathers and reads, and the nodes that move with them."""
    return {node for x in sources for node in (*x.reads, *x.chain)}


def _least(todo: Sequence[UnitSource], bounds: Sequence[Bound]) -> int:
    """Return the first position at which memory allows the next source to start."""
    if not todo:
        return 0
    x = todo[0]
    full = [np.flatnonzero(level[x.earliest : x.at] + x.nbytes > limit) for level, limit in bounds]
    return x.earliest + max(int(found[-1]) + 1 if found.size else 0 for found in full)


def _move(graph: Graph, sources: Sequence[UnitSource], starts: dict[Node, int]) -> None:
    """Put each gather and read before the node at its position in `starts`, or at its earliest one, in their order."""
    nodes, moves = list(graph.nodes), []
    inside = _moving(sources)
    at = early_at = 0
    for x in sources:
        at = max(at, min(x.at, max(x.earliest, starts.get(x.start, x.at))))
        while at < x.at and nodes[at] in inside:  # after the earlier ones
            at += 1
        for node in x.reads:
            early_at = max(early_at, min(at, max(x.earliest, starts.get(node, at))))
            while early_at < at and nodes[early_at] in inside:
                early_at += 1
            moves += [(early_at, node)] if early_at < x.at else []
        moves += [(at, node) for node in x.chain] if at < x.at else []
    for at, node in sorted(moves, key=lambda x: x[0]):
        nodes[at].prepend(node)


def _order(graph: Graph, sources: Sequence[UnitSource]) -> list[int]:
    """Return how many other transfers start before each source."""
    ours, found, others = {x.start for x in sources}, [], 0
    for node in graph.nodes:
        if node in ours:
            found.append(others)
        others += is_start(node) and node not in ours
    return found


def _ordered(
    graph: Graph, sources: Sequence[UnitSource], starts: Mapping[Node, int], order: Sequence[int]
) -> dict[Node, int]:
    """Return `starts` with each source behind as many other transfers as `order` says."""
    ours, found = {x.start for x in sources}, dict(starts)
    others = [k for k, node in enumerate(graph.nodes) if is_start(node) and node not in ours]
    for x, n in zip(sources, order, strict=False):
        first = others[n - 1] + 1 if 0 < n <= len(others) else 0
        last = others[n] if n < len(others) else x.at
        found[x.start] = max(first, min(found.get(x.start, x.at), last))
    return found


def _chosen(graph: Graph, names: frozenset[tuple[str, str]]) -> dict[Node, int]:
    """Return gather -> its chosen position, from names."""
    before, nodes = dict(names), {n.name: k for k, n in enumerate(graph.nodes)}
    return {n: nodes[before[n.name]] for n in graph.nodes if before.get(n.name) in nodes}


def _chain(start: Node, where: dict[Node, int]) -> list[Node]:
    """Return a gather with the nodes that only prepare its shard: reads, decodes and casts."""
    found, todo = [start], [start]
    while todo:
        for node in todo.pop().all_input_nodes:
            prepares = casts(node) or decodes(node) or fetched(node) or is_fetch(node)
            if prepares and len(node.users) == 1:
                found.append(node)
                todo.append(node)
    return sorted(found, key=where.__getitem__)


def few_alive(gm: GraphModule, sources: Sequence[UnitSource]) -> Bound:
    """Return the limit for gathered units: three consecutive ones, or what the graph holds anyway."""
    where, root = positions(gm.graph), roots(gm.graph)
    last = last_uses(gm.graph, where, root)
    level = np.zeros(len(where), dtype=np.int64)
    for x in sources:
        level[where[x.start] : last[root[wait_of(x.start)]] + 1] += x.nbytes
    sizes = [x.nbytes for x in sources]
    most = max((sum(sizes[k : k + ALIVE]) for k in range(len(sizes))), default=0)
    return Bound(level, max(most, int(level.max(initial=0))))
