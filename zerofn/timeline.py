"""A simulated run of a scheduled graph: when each node begins and ends, on the processor and on every link.

Each *lane* does one thing at a time, in the order in which the graph starts them: the processor that computes, the
links to other ranks, to and from host memory, and to and from drives, and the host's own updates. A wait lets the
processor stand still until what it waits for has come. All ranks are taken to be alike.
"""

from __future__ import annotations

import math
import operator
from collections import defaultdict
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch.fx import GraphModule, Node

from .graph.alias import body_of, roots, writes
from .graph.cost import DOWN, READ, SENT, UP, WRITTEN, Moved, flops, moved, touched_bytes
from .graph.edit import ASIDE, SCATTERS
from .graph.liveness import complete_values, tensors_of
from .imagined import is_host
from .loop import run_loop
from .machine import Machine

ops = torch.ops.zerofn
COMPUTE, UPDATES = "computing", "updates on the host"
Cost = Callable[[Node], float]
_NOTHING = (operator.getitem, ops.part.default, ops.flat.default, ops.room.default, ops.ticket.default)


class Span(NamedTuple):
    """Node `node` takes a lane from `start` to `stop`, in seconds from the beginning of the step."""

    lane: str
    node: Node
    start: float
    stop: float


class Timeline:
    """A run of a graph on `machine` by one of `world` ranks; `cost`: seconds of a node on a processor.

    `seconds`: a step's that follows another; `spans`: what takes which lane when; `starts`: when each node that
    ran began, in order; `busy`: seconds by lane; `waited`: seconds that the processor stood still, by what for.
    """

    def __init__(self, gm: GraphModule, machine: Machine, world: int, cost: Cost) -> None:
        self._machine, self._world, self._cost = machine, world, cost
        self.spans: list[Span] = []
        self.starts: list[tuple[Node, float]] = []
        self.busy: defaultdict[str, float] = defaultdict(float)
        self.waited: defaultdict[str, float] = defaultdict(float)
        self._free: dict[str, float] = defaultdict(float)  # lane -> when it has nothing to do
        self._ready: dict[Node, tuple[str, float]] = {}  # memory -> on which lane it is being made, and until when
        self._run(gm)
        first = self._free[COMPUTE]  # what is still under way goes on while the next step begins
        for told in (self.spans, self.starts, self.busy, self.waited):
            told.clear()
        self._run(gm)
        self.seconds = max(self._free[COMPUTE] - first, *self.busy.values(), 0.0)
        self.spans = [Span(x.lane, x.node, x.start - first, x.stop - first) for x in self.spans]
        self.starts = [(node, start - first) for node, start in self.starts]

    @property
    def bound(self) -> str:
        """What takes longest: the lane that is busiest while the processor computes, or waits for it."""
        return max(self.busy, key=self.busy.__getitem__, default=COMPUTE)

    def _run(self, gm: GraphModule) -> None:
        complete_values(gm.graph)
        root = roots(gm.graph)
        for node in gm.graph.nodes:
            if node.op != "call_function":
                continue
            self.starts.append((node, self._free[COMPUTE]))
            if node.target is run_loop:
                num_rounds: int = node.args[1]
                for _ in range(num_rounds):
                    self._run(body_of(node))
            else:
                self._step(node, root)

    def _step(self, node: Node, root: dict[Node, Node]) -> None:
        if node.target is ops.wait.default:
            self._wait(node, root[node.all_input_nodes[0]])
            return
        transfer = moved(node)
        if transfer is None and node.meta.get(ASIDE):
            self._meanwhile(UPDATES, node, self._cost(node), root)
            return
        if transfer is None:
            self._take(COMPUTE, node, 0.0, self._cost(node))
            return
        seconds, busy = self._seconds(node, transfer)
        self._take(COMPUTE, node, 0.0, self._machine.launch + busy)
        self._meanwhile(transfer.how, node, seconds, root)

    def _meanwhile(self, lane: str, node: Node, seconds: float, root: dict[Node, Node]) -> None:
        """Do something on another lane than the processor's, once its inputs are there."""
        given = max([self._free[COMPUTE], *(self._ready.get(root[x], ("", 0.0))[1] for x in node.all_input_nodes)])
        self._take(lane, node, given, seconds)
        for written in [root[x] for x in writes(node)] or [node]:
            self._ready[written] = lane, self._free[lane]

    def _wait(self, node: Node, memory: Node) -> None:
        lane, done = self._ready.get(memory, ("", 0.0))
        if node.meta.get(ASIDE):  # the host's own thread waits, not the one that launches
            return
        if done > self._free[COMPUTE]:
            self.waited[lane] += done - self._free[COMPUTE]
            self._free[COMPUTE] = done
        if memory.target in SCATTERS and is_host(memory.meta["val"].device):  # we sum what has come
            self._take(COMPUTE, node, 0.0, (self._world + 1) * memory.meta["val"].nbytes / self._machine.memory_rate)

    def _take(self, lane: str, node: Node, after: float, seconds: float) -> None:
        start = max(self._free[lane], after)
        self._free[lane] = start + seconds
        if seconds:
            self.busy[lane] += seconds
            self.spans.append(Span(lane, node, start, start + seconds))

    def _seconds(self, node: Node, transfer: Moved) -> tuple[float, float]:
        """Seconds that a transfer takes on its lane, and of the processor that computes."""
        m, nbytes = self._machine, transfer.nbytes
        if transfer.how == SENT:
            hops = math.ceil(math.log2(max(2, self._world)))
            return m.latency * hops + nbytes / m.rank_link(self._world), nbytes * m.busy
        rate = {UP: m.host_link, DOWN: m.host_link, READ: m.disk_read / m.ranks, WRITTEN: m.disk_write / m.ranks}
        return (nbytes / rate[transfer.how] if rate[transfer.how] else math.inf), 0.0


def roofline(machine: Machine) -> Cost:
    """Seconds of a node: by its arithmetic or by the bytes of memory that it touches, whichever takes longer."""
    def cost(node: Node) -> float:
        nbytes = touched_bytes(node)
        if node.target in _NOTHING or not nbytes:
            return 0.0
        given = [x for n in node.all_input_nodes for x in tensors_of(n.meta["val"])]
        values = tensors_of(node.meta.get("val")) or given
        on_host = machine.device != "cpu" and all(is_host(x.device) for x in values if x.dim())
        rate = machine.host_rate / machine.ranks if on_host else machine.memory_rate
        return max(machine.launch, flops(node) / machine.rate_of(values[0].dtype), nbytes / rate)

    return cost
