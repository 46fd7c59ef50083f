"""Simulate the ranks of a pipeline beside each other: each runs a graph of its own, and waits for what others send."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch.fx import GraphModule, Node

from ..comm.axes import BETWEEN, PIPE
from ..comm.mesh import Mesh
from ..graph.alias import writes
from ..graph.node_kinds import argument, traits
from .links import axis_of
from .machine import Machine
from .op_cost import Traffic
from .simulator import COMPUTE, Cost, Lanes

ops = torch.ops.zerofn


class _Meeting(NamedTuple):
    """What several ranks take part in: the n-th message of a channel, or the n-th transfer of a group. `posts`: how
    many ranks tell when their part ends before it is over.
    """

    of: tuple[object, ...]
    number: int
    posts: int


class Simulated(NamedTuple):
    """A step of a pipeline, directly after another one.

    `seconds`: from the end of the step before to its own end. By rank: `idle`, the share of it in which the rank waits
    for other stages; `exposed`, that in which it waits for transfers within its stages and for the host; and `busy`,
    seconds by lane. `bound`: the busiest lane of all.
    """

    seconds: float
    idle: tuple[float, ...]
    exposed: tuple[float, ...]
    busy: tuple[dict[str, float], ...]
    bound: str


class _Rank(Lanes):
    """One rank of a pipeline. `ends`: when each meeting ends for the ranks that have begun it, shared by all ranks.
    `idle`: seconds that it waited for other ranks of the pipeline.
    """

    def __init__(
        self, gm: GraphModule, machine: Machine, mesh: Mesh, cost: Cost | None, ends: defaultdict[_Meeting, list[float]]
    ) -> None:
        super().__init__(machine, mesh.num_ranks, cost, mesh)
        self.idle = 0.0
        self._root, self._nodes, self._at = self.roots_of(gm), list(gm.graph.nodes), 0
        self._ends, self._number = ends, Counter[object]()
        self._awaited: dict[Node, tuple[_Meeting, float]] = {}  # memory -> the meeting that fills it, its own end
        self._runs: dict[GraphModule, list[float | Node]] = {}  # bodies, as `_run_of` has them

    def again(self) -> None:
        """Go to the start of the graph."""
        self._at = 0
        self.idle = 0.0
        self.clear()

    def run(self, gm: GraphModule) -> None:
        """Run a body. Nobody asks when which of its nodes began: those that only compute are one step together."""
        root = self.roots_of(gm)
        if gm not in self._runs:
            self._runs[gm] = list(self._run_of(gm))
        for part in self._runs[gm]:
            if isinstance(part, Node):
                self.step(part, root)
            else:
                self.free[COMPUTE] += part
                self.busy[COMPUTE] += part

    def _run_of(self, gm: GraphModule) -> Iterator[float | Node]:
        """Yield nodes of a body, and between them the seconds of those that only compute."""
        seconds = 0.0
        for node in gm.graph.nodes:
            alone = self.computing(node)
            if alone is None:
                yield seconds
                yield node
                seconds = 0.0
            else:
                seconds += alone
        yield seconds

    def advance(self) -> bool:
        """Run nodes up to one that waits for what another rank has not begun. Return whether any ran."""
        before = self._at
        for node in self._nodes[before:]:
            if node.target is ops.wait.default and not self._arrived(self._root[node.all_input_nodes[0]]):
                break
            self.step(node, self._root)
            if node.op == "call_function":
                self._meet(node)
            self._at += 1
        return self._at > before

    @property
    def done_with_all(self) -> bool:
        """Whether it has run its graph."""
        return self._at == len(self._nodes)

    def transfer(self, node: Node, x: Traffic) -> tuple[str, float]:
        """As for `Lanes`; what is received occupies the sender's lane."""
        lane, seconds = super().transfer(node, x)
        return lane, 0.0 if traits(node).collective == "receive" else seconds

    def _meet(self, node: Node) -> None:
        """Note what a node takes part in, and when it ends as far as this rank is concerned."""
        if PIPE not in axis_of(node, self.mesh).split(BETWEEN):
            return
        assert self.mesh is not None
        how, group, own = traits(node).collective, argument(node, "group"), self.mesh.stages.rank
        memories = [self._root[x] for x in writes(node)] or [node]
        end = self.done(memories[0])
        if how in ("send", "receive"):
            peer = argument(node, "peer")
            meeting = self._next((group, own, peer) if how == "send" else (group, peer, own), 1)
        else:
            meeting = self._next((group,), self.mesh.stages.size)
        if how != "receive":
            self._ends[meeting].append(end)
        if how != "send":
            self._awaited.update(dict.fromkeys(memories, (meeting, end)))

    def _next(self, of: tuple[object, ...], posts: int) -> _Meeting:
        self._number[of] += 1
        return _Meeting(of, self._number[of], posts)

    def _arrived(self, memory: Node) -> bool:
        """Return whether it is known when the transfer into some memory ends, and note it."""
        if memory not in self._awaited:
            return True
        meeting, own = self._awaited[memory]
        ends = self._ends[meeting]
        if len(ends) < meeting.posts:
            return False
        self.set_done(memory, max(own, *ends))
        return True

    def _wait(self, node: Node, memory: Node) -> None:
        before = self.free[COMPUTE]
        super()._wait(node, memory)
        if memory in self._awaited:
            self.idle += self.free[COMPUTE] - before


def simulated(
    graphs: Sequence[GraphModule], meshes: Sequence[Mesh], machine: Machine, cost: Cost | None = None
) -> Simulated:
    """Simulate a step of the ranks of a pipeline. `graphs`: what each of them runs; `meshes`: the grid as it sees it;
    `cost`: as for `Lanes`. Ranks along other axes do as these do.

    Raises `ValueError` if ranks wait for each other.
    """
    ends: defaultdict[_Meeting, list[float]] = defaultdict(list)
    ranks = [_Rank(gm, machine, mesh, cost, ends) for gm, mesh in zip(graphs, meshes, strict=True)]
    _run(ranks)
    first = max(rank.free[COMPUTE] for rank in ranks)
    for rank in ranks:
        rank.again()
    _run(ranks)
    busy = tuple(dict(rank.busy) for rank in ranks)
    seconds = max(max(rank.free[COMPUTE] for rank in ranks) - first, *(max(x.values(), default=0.0) for x in busy))
    lanes = [(n, lane) for x in busy for lane, n in x.items()]
    whole = seconds or 1.0
    idle = tuple(rank.idle / whole for rank in ranks)
    exposed = tuple((sum(rank.waited.values()) - rank.idle) / whole for rank in ranks)
    return Simulated(seconds, idle, exposed, busy, max(lanes, default=(0.0, COMPUTE))[1])


def _run(ranks: Sequence[_Rank]) -> None:
    while not all(rank.done_with_all for rank in ranks):
        if not any(rank.advance() for rank in ranks):
            raise ValueError(
                "the ranks of this pipeline would wait for each other forever, because they exchange "
                "messages in different orders."
            )
