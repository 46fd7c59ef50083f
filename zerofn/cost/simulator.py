"""Simulate a run of a graph: when each node begins and ends, on the processor and on every link.

Each *lane* does one thing at a time, in the order in which the graph starts them. Lanes are the processor that
computes, the links to other ranks, to and from host memory and to and from drives, and the host's updates. At a wait
the processor idles until the transfer ends. All ranks are assumed equal. Passes schedule transfers with it, and plans
predict a step's time.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch.fx import GraphModule, Node

from ..dry_run.fake_machine import is_host
from ..graph.alias import roots, writes
from ..graph.edit import loops
from ..graph.liveness import complete_values, tensors_of
from ..graph.loop import LoopCall, body_of, run_loop
from ..graph.node_kinds import ASIDE, reduces
from ..util.sizes import time_in_words
from .machine import Machine, hops, usual
from .op_cost import DOWN, READ, SENT, UP, WRITTEN, flops, moved, touched_bytes

ops = torch.ops.zerofn
COMPUTE, UPDATES = "computing", "updates on the host"
_KEY = "machine"  # a meta key of graph modules
Cost = Callable[[Node], float]
_NOTHING = (
    operator.getitem,
    *(getattr(ops, x).default for x in ("part", "flat", "drive_buffer", "bucket", "drive_handle")),
)


class Span(NamedTuple):
    """Node `node` occupies a lane from `start` to `stop`, in seconds from the start of the step."""

    lane: str
    node: Node
    start: float
    stop: float


class Lanes:
    """A simulated run of nodes on `machine`, by one of `world` ranks.

    `cost`: seconds of a node on the processor; by the machine's rates if None. `free`: lane -> when it becomes
    idle, in seconds from the start. `spans`: the use of lanes. `starts`: when each node began, in order. `busy`:
    seconds by lane. `waited`: seconds that the processor idled, by what it waited for.
    """

    def __init__(self, machine: Machine, world: int, cost: Cost | None = None) -> None:
        self.machine, self.world, self.cost = machine, world, cost or roofline(machine)
        self.spans: list[Span] = []
        self.starts: list[tuple[Node, float]] = []
        self.busy: defaultdict[str, float] = defaultdict(float)
        self.waited: defaultdict[str, float] = defaultdict(float)
        self.free: defaultdict[str, float] = defaultdict(float)
        self._ready: dict[Node, tuple[str, float]] = {}  # memory -> the lane that fills it, and until when

    def run(self, gm: GraphModule) -> None:
        """Run a graph."""
        complete_values(gm.graph)
        root = roots(gm.graph)
        for node in gm.graph.nodes:
            self.step(node, root)

    def step(self, node: Node, root: dict[Node, Node]) -> None:
        """Run a node. `root`: see `graph.alias.roots`."""
        if node.op != "call_function":
            return
        self.starts.append((node, self.free[COMPUTE]))
        if node.target is run_loop:
            for _ in range(LoopCall.of(node).num_rounds):
                self.run(body_of(node))
            return
        if node.target is ops.wait.default:
            self._wait(node, root[node.all_input_nodes[0]])
            return
        transfer = moved(node)
        if transfer is None:
            seconds = self.cost(node) * (self.machine.slowest if self.world > 1 else 1.0)  # the others wait for it
            if node.meta.get(ASIDE):
                self._meanwhile(UPDATES, node, seconds, root)
            else:
                self._take(COMPUTE, node, 0.0, seconds)
        else:
            how, nbytes = transfer.how, transfer.nbytes
            self._take(COMPUTE, node, 0.0, self.machine.launch + (nbytes * self.machine.busy if how == SENT else 0.0))
            self._meanwhile(how, node, self.seconds_of(how, nbytes), root)

    def done(self, memory: Node) -> float:
        """Return when the transfer into some memory ends."""
        return self._ready.get(memory, ("", 0.0))[1]

    def seconds_of(self, how: str, nbytes: int) -> float:
        """Return the seconds of a transfer on its lane."""
        m = self.machine
        if how == SENT:
            return m.latency * hops(self.world) + nbytes / m.rank_link(self.world)
        field, sharing = {
            UP: ("host_link", 1),
            DOWN: ("host_link", 1),
            READ: ("disk_read", m.ranks),
            WRITTEN: ("disk_write", m.ranks),
        }[how]
        return nbytes / (m.known(field) / sharing)

    def _meanwhile(self, lane: str, node: Node, seconds: float, root: dict[Node, Node]) -> None:
        """Use a lane beside the processor's, once the inputs are complete."""
        given = max([self.free[COMPUTE], *(self.done(root[x]) for x in node.all_input_nodes)])
        self._take(lane, node, given, seconds)
        for written in [root[x] for x in writes(node)] or [node]:
            self._ready[written] = lane, self.free[lane]

    def _wait(self, node: Node, memory: Node) -> None:
        lane, done = self._ready.get(memory, ("", 0.0))
        if node.meta.get(ASIDE):  # the host's thread for updates waits, and not the one that launches
            return
        if done > self.free[COMPUTE]:
            self.waited[lane] += done - self.free[COMPUTE]
            self.free[COMPUTE] = done
        if reduces(memory) and is_host(memory.meta["val"].device):  # the wait sums what arrived
            self._take(COMPUTE, node, 0.0, (self.world + 1) * memory.meta["val"].nbytes / self.machine.memory_rate)

    def _take(self, lane: str, node: Node, after: float, seconds: float) -> None:
        start = max(self.free[lane], after)
        self.free[lane] = start + seconds
        if seconds:
            self.busy[lane] += seconds
            self.spans.append(Span(lane, node, start, start + seconds))


class Timeline(Lanes):
    """The step of a scheduled graph, directly after another step. `seconds`: its duration."""

    def __init__(self, gm: GraphModule, machine: Machine, world: int, cost: Cost | None = None) -> None:
        super().__init__(machine, world, cost)
        self.run(gm)
        first = self.free[COMPUTE]  # transfers in flight continue while the next step begins
        for told in (self.spans, self.starts, self.busy, self.waited):
            told.clear()
        self.run(gm)
        self.seconds = max(self.free[COMPUTE] - first, *self.busy.values(), 0.0)
        self.spans = [Span(x.lane, x.node, x.start - first, x.stop - first) for x in self.spans]
        self.starts = [(node, start - first) for node, start in self.starts]

    def __repr__(self) -> str:
        lanes = sorted(self.busy.items(), key=lambda x: -x[1])
        busy = ", ".join(f"{lane} {time_in_words(seconds)}" for lane, seconds in lanes)
        return f"{time_in_words(self.seconds)} a step on {self.machine.name}, bound by {self.bound} ({busy})"

    @property
    def bound(self) -> str:
        """The lane that limits the step: the busiest one."""
        return max(self.busy, key=self.busy.__getitem__, default=COMPUTE)


def roofline(machine: Machine) -> Cost:
    """Return the seconds of a node: for its arithmetic or for the memory that it touches, whichever is longer."""

    def cost(node: Node) -> float:
        nbytes = touched_bytes(node)
        if node.target in _NOTHING or not nbytes:
            return 0.0
        given = [x for n in node.all_input_nodes for x in tensors_of(n.meta["val"])]
        values = tensors_of(node.meta.get("val")) or given
        large = (
            [x for x in values if x.dim()] or [x for x in given if x.dim()] or values
        )  # numbers may be on either device
        on_host = machine.device != "cpu" and all(is_host(x.device) for x in large)
        rate = machine.known("host_rate") / machine.ranks if on_host else machine.memory_rate
        return max(machine.launch, flops(node) / machine.rate_of(values[0].dtype), nbytes / rate)

    return cost


def note_machine(gm: GraphModule, machine: Machine | None, world: int) -> None:
    """Note, for passes, the machine and number of ranks that will run a graph and its loops. None: a typical machine
    of its kind.
    """
    if machine is None:
        inputs = [x for n in gm.graph.nodes if n.op == "placeholder" for x in tensors_of(n.meta.get("val")) if x.dim()]
        machine = usual(accelerated=not all(is_host(x.device) for x in inputs))
    gm.meta[_KEY] = machine, world
    for _, body in loops(gm):
        note_machine(body, machine, world)


def lanes_of(gm: GraphModule) -> Lanes:
    """Return an empty run on the machine that was noted for a graph."""
    if _KEY not in gm.meta:
        note_machine(gm, None, 1)
    return Lanes(*gm.meta[_KEY])


def simulated(gm: GraphModule) -> Timeline:
    """Simulate a step on the machine that was noted for its graph."""
    lanes = lanes_of(gm)
    return Timeline(gm, lanes.machine, lanes.world)
