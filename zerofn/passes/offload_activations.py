"""Offload activations to host memory between the forward and the backward pass.

Each is sent after its last use in the forward pass and copied back just in time, by simulated costs. Both transfers
overlap computation. Meanwhile it takes no device memory.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch.fx import Graph, GraphModule, Node

from ..cost.op_cost import UP, moved
from ..cost.simulator import Lanes
from ..dry_run.fake_machine import host
from ..graph.alias import is_lent, positions, roots, touches, written_memory
from ..graph.edit import clean
from ..graph.liveness import AGAIN, complete_values, memory_bytes
from ..graph.node_kinds import is_start
from ..graph.phase import BACKWARD, FORWARD, phase_of
from ..graph.program import tensor_of
from ._context import Context

ops = torch.ops.zerofn
UNDER_WAY = 2  # activations in transfer to the host at a time, and as many that are on the way back or not used yet


class Stay(NamedTuple):
    """Memory that may be offloaded between its last use in the forward pass and its first use in the backward pass."""

    memory: Node
    last: Node
    first: Node


def stays(graph: Graph) -> list[Stay]:
    """Return what may be offloaded, in order of creation: values of the forward pass that are never written to, and
    that only the forward and then the backward pass read.
    """
    root = roots(graph)
    touched, written = touches(graph, root), written_memory(root)
    out: list[Stay] = []
    for node in graph.nodes:
        if root[node] is node and phase_of(node) == FORWARD and node not in written and _can_leave(node):
            users = touched[node]
            phases = [phase_of(x) for x in users]
            num = phases.count(FORWARD)
            if num < len(phases) and phases == [FORWARD] * num + [BACKWARD] * (len(phases) - num):
                out.append(Stay(node, users[num - 1], users[num]))
    return out


def _can_leave(node: Node) -> bool:
    """Return whether a copy of a node's value can replace its memory: the value fills and owns it."""
    if node.op != "call_function" or is_start(node) or is_lent(node) or node.target is ops.bring.default:
        return False
    value = tensor_of(node)
    return value is not None and value.dim() > 0 and 0 < value.nbytes == memory_bytes(value)


def offload_activations(gm: GraphModule, context: Context) -> None:
    """Copy the chosen activations to host memory after their last forward use, and back before their backward use.

    At most `UNDER_WAY` copies to the host are in flight. Start each copy back just in time for its first use, and
    early enough for the copies behind it on the link. The memory search makes the choice. `recompute_activations` runs
    before: an activation that it recomputes has no backward use left.
    """
    chosen = context.choice.offloaded
    found = [x for x in stays(gm.graph) if x.memory.name in chosen] if chosen else []
    if not found:
        return
    complete_values(gm.graph)
    places = _Places(gm.graph, context.lanes())
    begins = places.back(found)
    ends = places.left(found, begins)
    nodes, root = places.nodes, roots(gm.graph)
    users = touches(gm.graph, root)
    sent = {x: _move(gm.graph, x.memory, host(), nodes[places.where[x.last] + 1], FORWARD) for x in found}
    there = {x: _wait(gm.graph, sent[x], nodes[ends[x]]) for x in found}
    for x in sorted(found, key=lambda x: (begins[x], places.where[x.first])):
        back = _move(gm.graph, there[x], x.memory.meta["val"].device, nodes[begins[x]], BACKWARD)
        views = _Views(gm.graph, root, x.memory, _wait(gm.graph, back, x.first))
        for user in users[x.memory]:
            if phase_of(user) == BACKWARD:
                views.feed(user)
    clean(gm)


class _Places:
    """Positions of transfers and of their waits, as indices of `nodes`: each is inserted before that node."""

    def __init__(self, graph: Graph, lanes: Lanes) -> None:
        self.nodes, self.where, self._lanes = list(graph.nodes), positions(graph), lanes
        computes = (lanes.cost(n) if n.op == "call_function" and moved(n) is None else 0.0 for n in self.nodes)
        self._time = [0.0, *accumulate(computes)]  # when each node begins

    def back(self, found: list[Stay]) -> dict[Stay, int]:
        """Return where each copy back starts: just in time for its first use, after the copies that are needed
        earlier.
        """
        order = sorted(found, key=lambda x: self.where[x.first])
        free = self._time[-1]  # the link is busy after this time
        out: dict[Stay, int] = {}
        for k, x in reversed(list(enumerate(order))):
            start = min(free, self._time[self.where[x.first]]) - self._seconds(x)
            others = self.where[order[k - UNDER_WAY].first] if k >= UNDER_WAY else 0
            out[x] = max(bisect_right(self._time, start) - 1, others, self.where[x.last] + 1)
            free = self._time[out[x]]
        return out

    def _seconds(self, x: Stay) -> float:
        return self._lanes.seconds_of(UP, memory_bytes(x.memory.meta["val"]))

    def left(self, found: list[Stay], begins: dict[Stay, int]) -> dict[Stay, int]:
        """Return where the wait for each copy to the host is placed.

        That is where the copy should be complete, but before more than `UNDER_WAY` copies are in flight, and before the
        value is copied back.
        """
        order = sorted(found, key=lambda x: self.where[x.last])
        free = 0.0  # the link is busy until this time
        out: dict[Stay, int] = {}
        for k, x in enumerate(order):
            after = self.where[x.last] + 1
            free = max(free, self._time[after]) + self._seconds(x)
            late = [self.where[y.last] for y in order[k + UNDER_WAY : k + UNDER_WAY + 1]]
            out[x] = max(after, min([bisect_left(self._time, free), begins[x], *late]))
            free = min(free, self._time[out[x]])
        return out


class _Views:
    """What the backward pass reads of one activation, rebuilt from its copy."""

    def __init__(self, graph: Graph, root: dict[Node, Node], memory: Node, back: Node) -> None:
        self._graph, self._root, self._memory = graph, root, memory
        self._copies = {memory: back}

    def feed(self, user: Node) -> None:
        """Let a node of the backward pass read the copy."""
        for x in user.all_input_nodes:
            if phase_of(x) == FORWARD and self._root[x] is self._memory:
                user.replace_input_with(x, self._copy(x, user))

    def _copy(self, view: Node, before: Node) -> Node:
        if view not in self._copies:
            mine = {x: self._copy(x, before) for x in view.all_input_nodes if self._root[x] is self._memory}
            with self._graph.inserting_before(before):
                made = self._graph.node_copy(view, lambda x: mine.get(x, x))
            made.meta["phase"] = BACKWARD
            self._copies[view] = made
        return self._copies[view]


def _move(graph: Graph, x: Node, device: torch.device, before: Node, phase: str) -> Node:
    """Start to copy `x` to a device."""
    node = _call(graph, ops.bring.default, (x, device), {"offloaded": True}, before, phase)
    node.meta["val"] = x.meta["val"].to(device)
    if phase == BACKWARD:
        node.meta[AGAIN] = True
    return node


def _wait(graph: Graph, start: Node, before: Node) -> Node:
    node = _call(graph, ops.wait.default, (start,), {}, before, start.meta["phase"])
    node.meta["val"] = start.meta["val"]
    return node


def _call(graph: Graph, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], before: Node, phase: str) -> Node:
    with graph.inserting_before(before):
        node = graph.call_function(target, args, kwargs)
    node.meta["phase"] = phase
    return node
