"""Cut a body into its forward and its backward pass."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from .._torch_compat import LazyGraphModule
from .alias import is_view, roots, sources, writes
from .edit import clean
from .liveness import AGAIN
from .nested import insert_call, results_of
from .node_kinds import start_of
from .phase import BACKWARD, FORWARD, phase_of
from .program import alike, tensor_of
from .source_lines import line_behind

ops = torch.ops.zerofn


def split_by_phase(body: GraphModule) -> GraphModule:
    """Return a graph with the inputs and results of `body`, which calls two bodies: `forward_pass`, then
    `backward_pass`.

    What the backward pass reads of the forward pass are further results of the first: each memory once, since views are
    taken again where they are read. `body` stays as it is, and its nodes keep their names.

    To the backward pass belong its nodes, those that run again for it, and all that follows from either, through values
    or through memory that is written: accesses to the same memory keep their order. A transfer whose wait is there
    starts there. The rest is the forward pass.

    Raises `ValueError` for a body without a backward pass, for one with places in static buffers, in which values come
    and go in one order, and for an operation that gives its input another shape.
    """
    nodes = [x for x in body.graph.nodes if x.op == "call_function"]
    if any(x.target is ops.bucket.default or x.kwargs.get("place") for x in nodes):
        raise ValueError(
            "split_by_phase: the pass assign_buffers has already placed the body's values in static buffers. Call "
            "split_by_phase before assign_buffers."
        )
    late = _backward_pass(body.graph, nodes)
    if not late:
        raise ValueError("split_by_phase: the body has no backward pass.")
    first, second = _Piece(body, [x for x in nodes if x not in late]), _Piece(body, [x for x in nodes if x in late])
    outer = _Piece(body, [])
    for x in body.graph.nodes:
        if x.op == "placeholder":
            outer.value(x)
    results = results_of(body)
    returned = list(dict.fromkeys(y for x in results if isinstance(x, Node) for y in outer.needs(x)))
    saved = [x for x in second.inputs if x.op != "placeholder"]
    made = dict.fromkeys([*(x for x in returned if x in first.own), *saved])
    outer.call("forward_pass", first, list(made), FORWARD)
    outer.call("backward_pass", second, [x for x in returned if x in second.own], BACKWARD)
    return outer.finished([outer.value(x) if isinstance(x, Node) else x for x in results])


def _backward_pass(graph: Graph, nodes: list[Node]) -> set[Node]:
    """Return the operations of the backward pass. `nodes`: all operations of the graph, in order."""
    root = roots(graph)
    found: set[Node] = set()
    for node in nodes:
        mine = phase_of(node) == BACKWARD or node.meta.get(AGAIN)
        if mine or found and not phase_of(node):  # such as a unit that is gathered again
            found.update([node] if node.target is not operator.getitem else [])
    size = -1
    while len(found) > size:
        size = len(found)
        touched: set[Node] = set()  # memory that the backward pass has come to by now
        written: set[Node] = set()  # and changed
        for node in nodes:
            read, changed = {root[x] for x in node.all_input_nodes}, {root[x] for x in writes(node)}
            follows = not found.isdisjoint(node.all_input_nodes)
            if follows or not written.isdisjoint(read) or not touched.isdisjoint(changed):
                found.add(node)
            if node in found:
                touched |= read
                written |= changed
        found.update(x for x in map(start_of, list(found)) if x is not None and x.op == "call_function")
    return found


class _Piece:
    """A part of a body as a graph of its own. `own`: the operations that it computes. `inputs`: the values of the body
    that it is given.
    """

    def __init__(self, body: GraphModule, own: Sequence[Node]) -> None:
        self.own, self.inputs = set(own), list[Node]()
        self._body, self._graph = body, Graph()
        self._found: dict[Node, Node] = {}
        self._parts: dict[str, Any] = {}  # constants and bodies
        for node in own:
            self.value(node)

    def value(self, node: Node) -> Node:
        """Return a value of the body in this graph."""
        if node not in self._found:
            self._found[node] = self._made(node)
        return self._found[node]

    def needs(self, node: Node) -> Iterator[Node]:
        """Yield the values that have to be given for a value of the body."""
        if self._is_given(node):
            yield node
        elif node.op != "get_attr":
            for x in node.all_input_nodes if is_view(node) else sources(node)[:1]:
                yield from self.needs(x)

    def call(self, name: str, piece: _Piece, results: list[Node], phase: str) -> None:
        """Call another piece for these values of the body, which are then there."""
        inputs = [self.value(x) for x in piece.inputs]
        self._parts[name] = piece.finished([piece.value(x) for x in results])
        for x, part in zip(results, insert_call(self._graph, name, inputs, results, {"phase": phase}), strict=True):
            self._found[x] = part
            part.meta.update(val=x.meta["val"], phase=phase)

    def finished(self, results: list[Any]) -> GraphModule:
        """Return the graph with these results."""
        self._graph.output(results)
        gm = LazyGraphModule(self._parts, self._graph)
        gm.meta.update(self._body.meta)
        return clean(gm)  # of views that only the other piece reads

    def _is_given(self, node: Node) -> bool:
        if node.op != "call_function" or node in self.own:
            return node.op == "placeholder"
        start = start_of(node)
        return not sources(node) or start is not None and start.op == "call_function"

    def _made(self, node: Node) -> Node:
        if node.op == "get_attr":
            self._parts[str(node.target)] = operator.attrgetter(str(node.target))(self._body)
        elif self._is_given(node):
            return self._input(node)
        elif node not in self.own and not is_view(node):  # it is what it writes to
            (source, *_) = sources(node)
            if not alike(tensor_of(node), tensor_of(source)):
                raise ValueError(
                    f"split_by_phase: {node.target}{line_behind(node)} changes the shape of its input in place. Use an "
                    "operation that returns a new tensor."
                )
            return self.value(source)
        return self._graph.node_copy(node, self.value)

    def _input(self, node: Node) -> Node:
        """Return a new input, behind the others."""
        last = self._found[self.inputs[-1]] if self.inputs else None
        first = next(iter(self._graph.nodes), None)
        with self._graph.inserting_after(last) if last else self._graph.inserting_before(first):
            made = self._graph.placeholder(node.name)
        made.meta["val"] = node.meta["val"]
        self.inputs.append(node)
        return made
