"""Simulate a run of a graph: when each node begins and ends, on the processor and on every link.

Each *lane* does one thing at a time, in the order in which the graph starts them. Lanes are the processor that
computes, the links to other ranks, to and from host memory and to and from drives, and the host's updates. At a wait
the processor idles until the transfer ends. All ranks are assumed equal. Passes schedule transfers with it, and plans
predict a step's time.

On a mesh, transfers along each axis have a lane. Lanes that lie on the same cable share what it carries: the transfer
with less left to send goes first, and the other one ends later by that time. (If both went at half the rate, the
longer one would end at the same time. The shorter ones are those that the processor waits for: the sums of a layer that
is cut, while the next unit is gathered.)
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch.fx import GraphModule, Node

from ..comm.mesh import Mesh
from ..dry_run.fake_machine import is_host
from ..graph.alias import roots, writes
from ..graph.liveness import complete_values, tensors_of
from ..graph.nested import Call, call_of, is_region
from ..graph.node_kinds import ASIDE, argument, reduces, traits
from ..util.sizes import time_in_words
from .links import SENT, Links
from .machine import Machine, usual
from .op_cost import DOWN, READ, UP, WRITTEN, Traffic, coded_bytes, flops, moved, of_graphs, touched_bytes

ops = torch.ops.zerofn
COMPUTE, UPDATES = "computing", "updates on the host"
Cost = Callable[[Node], float]
_NOTHING = (
    operator.getitem,
    *(getattr(ops, x).default for x in ("part", "flat", "drive_buffer", "bucket", "drive_handle")),
)


class LaneSpan(NamedTuple):
    """Node `node` occupies a lane from `start` to `stop`, in seconds from the start of the step."""

    lane: str
    node: Node
    start: float
    stop: float


class Lanes:
    """A simulated run of nodes on `machine`, by one of `world` ranks, which form `mesh` if that is given.

    `cost`: seconds of a node on the processor; by the machine's rates if None. `free`: lane -> when it becomes
    idle, in seconds from the start. `spans`: the use of lanes. `starts`: when each node began, in order. `busy`:
    seconds by lane. `waited`: seconds that the processor idled, by what it waited for.
    """

    def __init__(self, machine: Machine, world: int, cost: Cost | None = None, mesh: Mesh | None = None) -> None:
        self.machine, self.world, self.cost, self.mesh = machine, world, cost or roofline(machine), mesh
        self.links = Links(machine, world, mesh)
        # In the order of first use, so that all ranks have the same sums: cable -> the lanes on it; lane -> the memory
        # that it fills.
        self._lanes_on: defaultdict[str, dict[str, None]] = defaultdict(dict)
        self._filled: defaultdict[str, dict[Node, None]] = defaultdict(dict)
        self.spans: list[LaneSpan] = []
        self.starts: list[tuple[Node, float]] = []
        self.busy: defaultdict[str, float] = defaultdict(float)
        self.waited: defaultdict[str, float] = defaultdict(float)
        self.free: defaultdict[str, float] = defaultdict(float)
        self._ready: dict[Node, tuple[str, float]] = {}  # memory -> the lane that fills it, and until when
        self._decoded: dict[Node, int] = {}  # memory -> bytes that the wait for it reads and writes to decode
        # Of graphs that have run, since bodies run again: see `roots`; what a node moves, and its seconds otherwise.
        self._roots: dict[GraphModule, dict[Node, Node]] = {}
        self._costs: dict[Node, tuple[Traffic | None, float]] = {}
        self._coded: dict[Node, tuple[int, int]] = {}  # bytes that a transfer's start and wait read and write: codes

    def run(self, gm: GraphModule) -> None:
        """Run a graph. It may not change before it runs again."""
        root = self.roots_of(gm)
        for node in gm.graph.nodes:
            self.step(node, root)

    def roots_of(self, gm: GraphModule) -> dict[Node, Node]:
        """Return `graph.alias.roots` of a graph that may not change any more."""
        if gm not in self._roots:
            complete_values(gm.graph)
            self._roots[gm] = roots(gm.graph)
        return self._roots[gm]

    def clear(self) -> None:
        """Forget what has run, but not when lanes become idle: transfers in flight continue."""
        for told in (self.spans, self.starts, self.busy, self.waited):
            told.clear()

    def step(self, node: Node, root: dict[Node, Node]) -> None:
        """Run a node. `root`: see `graph.alias.roots`."""
        if node.op != "call_function":
            return
        self.starts.append((node, self.free[COMPUTE]))
        if (call := call_of(node)) and not is_region(call.body):  # a region is compiled: one pass over its inputs
            for k in range(call.rounds):
                self.run(call.body)
                if k:  # the first round's terms are the sums
                    self._take(COMPUTE, node, 0.0, self._adding(node, call))
            return
        if node.target is ops.wait.default:
            self._wait(node, root[node.all_input_nodes[0]])
            return
        transfer, seconds = self._cost_of(node)
        if transfer is None:
            if node.meta.get(ASIDE):
                self._meanwhile(UPDATES, node, seconds, root)
            else:
                self._take(COMPUTE, node, 0.0, seconds)
        else:
            copied = transfer.nbytes * self.machine.busy if transfer.how == SENT else 0.0
            if node not in self._coded:
                self._coded[node] = coded_bytes(node)
            encoded, decoded = self._coded[node]
            self._take(COMPUTE, node, 0.0, self.machine.launch + copied + encoded / self.machine.memory_rate)
            lane, seconds = self.transfer(node, transfer)
            start = self._meanwhile(lane, node, seconds, root)
            if decoded:
                self._decoded.update(dict.fromkeys([root[x] for x in writes(node)] or [node], decoded))
            if transfer.how == SENT:
                self._share(lane, self.links.of(node).cable, start, seconds)

    def computing(self, node: Node) -> float | None:
        """Return the seconds of a node that the processor runs, and nothing else; None of others."""
        if node.op != "call_function":
            return 0.0
        call = call_of(node)
        if node.target is ops.wait.default or node.meta.get(ASIDE) or (call and not is_region(call.body)):
            return None
        transfer, seconds = self._cost_of(node)
        return seconds if transfer is None else None

    def _cost_of(self, node: Node) -> tuple[Traffic | None, float]:
        """Return what a node moves, and its seconds if that is nothing; the slowest rank's, for others wait for it."""
        if node not in self._costs:
            transfer, slowest = moved(node), self.machine.slowest if self.world > 1 else 1.0
            self._costs[node] = transfer, self.cost(node) * slowest if transfer is None else 0.0
        return self._costs[node]

    def _adding(self, node: Node, call: Call) -> float:
        """Return the seconds in which a loop adds the terms of a round to its sums."""
        sums = [x.nbytes for x in tensors_of(node.meta["val"])[: call.num_sums + call.parts.number]]
        return sum(max(self.machine.launch, 3 * nbytes / self.machine.memory_rate) for nbytes in sums if nbytes)

    def done(self, memory: Node) -> float:
        """Return when the transfer into some memory ends."""
        return self._ready.get(memory, ("", 0.0))[1]

    def set_done(self, memory: Node, when: float) -> None:
        """Say when the transfer into some memory ends: others decide it, too."""
        self._ready[memory] = self._ready[memory][0], when

    def transfer(self, node: Node, x: Traffic) -> tuple[str, float]:
        """Return the lane of a node's transfer, and the seconds that it takes there alone."""
        if x.how != SENT:
            return x.how, self.seconds_of(x.how, x.nbytes)
        link = self.links.of(node)
        return link.lane, link.latency + x.nbytes / link.rate

    def message(self, axis: str, ends: tuple[int, int], nbytes: int) -> float:
        """Return the seconds of a message between two places along an axis of the mesh."""
        link = self.links.between(axis, ends)
        return link.latency + nbytes / link.rate

    def seconds_of(self, how: str, nbytes: int) -> float:
        """Return the seconds of a transfer between device, host and drives, on its lane."""
        m = self.machine
        field, sharing = {
            UP: ("host_link", 1),
            DOWN: ("host_link", 1),
            READ: ("disk_read", m.ranks),
            WRITTEN: ("disk_write", m.ranks),
        }[how]
        return nbytes / (m.known(field) / sharing)

    def _meanwhile(self, lane: str, node: Node, seconds: float, root: dict[Node, Node]) -> float:
        """Use a lane beside the processor's, once the inputs are complete. Return from when on."""
        given = max([self.free[COMPUTE], *(self.done(root[x]) for x in node.all_input_nodes)])
        start = self._take(lane, node, given, seconds)
        for written in [root[x] for x in writes(node)] or [node]:
            self._ready[written] = lane, self.free[lane]
            self._filled[lane].pop(written, None)
            self._filled[lane][written] = None
        return start

    def _share(self, lane: str, cable: str, start: float, seconds: float) -> None:
        """Let the last transfer of a lane share its cable with those of other lanes: who has less left goes first."""
        self._lanes_on[cable][lane] = None
        for other in self._lanes_on[cable]:
            left = self.free[other] - start
            if other == lane:
                continue
            if 0.0 < left < seconds:
                self._delay(lane, start, left)
            elif left > 0.0:
                self._delay(other, start, seconds)

    def _delay(self, lane: str, start: float, seconds: float) -> None:
        """Let what a lane has not done at `start` end later by `seconds`."""
        self.free[lane] += seconds
        for memory in reversed(self._filled[lane]):
            where, done = self._ready[memory]
            if where == lane and done <= start:
                break
            if where == lane:
                self._ready[memory] = lane, done + seconds
        for k in range(len(self.spans) - 1, -1, -1):
            span = self.spans[k]
            if span.lane == lane and span.stop <= start:
                break
            if span.lane == lane:
                begun = span.start + (seconds if span.start >= start else 0.0)
                self.spans[k] = span._replace(start=begun, stop=span.stop + seconds)

    def _wait(self, node: Node, memory: Node) -> None:
        lane, done = self._ready.get(memory, ("", 0.0))
        if node.meta.get(ASIDE):  # the host's thread for updates waits, and not the one that launches
            return
        if done > self.free[COMPUTE]:
            self.waited[lane] += done - self.free[COMPUTE]
            self.free[COMPUTE] = done
        nbytes = self._decoded.pop(memory, 0)
        if not nbytes and reduces(memory) and is_host(memory.meta["val"].device):  # the wait sums what arrived
            nbytes = (argument(memory, "size") + 1) * memory.meta["val"].nbytes
        self._take(COMPUTE, node, 0.0, nbytes / self.machine.memory_rate)

    def _take(self, lane: str, node: Node, after: float, seconds: float) -> float:
        start = max(self.free[lane], after)
        self.free[lane] = start + seconds
        if seconds:
            self.busy[lane] += seconds
            self.spans.append(LaneSpan(lane, node, start, start + seconds))
        return start


class Timeline(Lanes):
    """The step of a scheduled graph, directly after another step. `seconds`: its duration."""

    def __init__(
        self, gm: GraphModule, machine: Machine, world: int, cost: Cost | None = None, mesh: Mesh | None = None
    ) -> None:
        super().__init__(machine, world, cost, mesh)
        self.run(gm)
        first = self.free[COMPUTE]
        self.clear()
        self.run(gm)
        cables = [sum(self.busy[lane] for lane in lanes) for lanes in self._lanes_on.values()]
        self.seconds = max(self.free[COMPUTE] - first, *self.busy.values(), *cables, 0.0)
        self.spans = [LaneSpan(x.lane, x.node, x.start - first, x.stop - first) for x in self.spans]
        self.starts = [(node, start - first) for node, start in self.starts]

    def __repr__(self) -> str:
        lanes = sorted(self.busy.items(), key=lambda x: -x[1])
        busy = ", ".join(f"{lane} {time_in_words(seconds)}" for lane, seconds in lanes)
        return f"{time_in_words(self.seconds)} a step on {self.machine.name}, {limit_in_words(self.bound)} ({busy})"

    @property
    def bound(self) -> str:
        """The lane that limits the step: the busiest one."""
        return max(self.busy, key=self.busy.__getitem__, default=COMPUTE)


def limit_in_words(lane: str) -> str:
    """Return what limits a step, `Timeline.bound`, for a sentence.

    >>> limit_in_words("computing"), limit_in_words("sent along data"), limit_in_words("read")
    ('compute-bound', 'limited by bytes sent along data', 'limited by bytes read')
    """
    if lane == COMPUTE:
        return "compute-bound"
    return f"limited by {lane if lane == UPDATES else f'bytes {lane}'}"


def roofline(machine: Machine) -> Cost:
    """Return the seconds of a node: for its arithmetic or for the memory that it touches, whichever is longer. What
    runs graphs of its own, such as `torch.cond`, takes as long as their nodes.
    """

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
        products = flops(node) / machine.rate_of(_multiplied(node) or values[0].dtype)
        own = max(machine.launch, products, nbytes / rate)
        return max(own, of_graphs(node, cost))

    return cost


def _multiplied(node: Node) -> torch.dtype | None:
    """Return the dtype in which a node multiplies, where its operation says so."""
    known = traits(node).multiplies
    return argument(node, known).meta["val"].dtype if isinstance(known, str) else known


def usual_for(gm: GraphModule) -> Machine:
    """Return a typical machine with the kind of device on which a graph's inputs are."""
    inputs = [x for n in gm.graph.nodes if n.op == "placeholder" for x in tensors_of(n.meta.get("val")) if x.dim()]
    return usual(accelerated=not all(is_host(x.device) for x in inputs))
