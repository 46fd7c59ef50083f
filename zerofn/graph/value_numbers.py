"""What each value of a step is computed by, as a number: ranks that have the same number have the same value.

A step's Python may ask which rank it is on, and use the answer where no tensor tells of it: as an index, a size, a
shift, a constant, in a branch. Each rank captures a graph of its own, so this is seen where ranks compare. Along one
axis of a mesh, the number of a value follows from the operation, its arguments, and the numbers of its inputs; a
transfer along that axis makes one value of what ranks have, whose number is its place among these transfers.
"""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from ..ops.registry import OnShard
from .alias import roots, writes
from .nested import Call, call_of
from .node_kinds import makes_one, only_moves, traits
from .node_text import NodeText, name_of
from .own_values import axes_of_transfer
from .program import Program

ops = torch.ops.zerofn


def expressions(program: Program, nodes: Mapping[Node, NodeText]) -> dict[str, dict[Node, int]]:
    """Return, for each axis of several ranks, the number of each value; see above. Bodies are included.

    `nodes`: what each node is, from `written`.
    """
    mesh = program.mesh
    axes = [axis.name for axis in mesh.axes if axis.size > 1] if mesh is not None else []
    texts = {node: x.text() for node, x in nodes.items()} if axes else {}
    found: dict[str, dict[Node, int]] = {}
    for axis in axes:
        given = {node: number("input", k) for k, node in enumerate(program.placeholders)}
        found[axis] = {}
        Numbers(program, axis, texts, found[axis]).follow(program.gm, given)
    return found


class Numbers:
    """Numbers the values of graphs along one axis. `texts`: what is not a tensor in each node."""

    def __init__(self, program: Program, axis: str, texts: Mapping[Node, str], found: dict[Node, int]) -> None:
        self._program, self._axis, self._texts, self._found = program, axis, texts, found
        self._transfers = 0

    def follow(self, gm: GraphModule, given: Mapping[Node, int]) -> dict[Node, int]:
        """Number a graph's values. Return how its memory was written, by the node that made it."""
        graph: Graph = gm.graph
        memory = roots(graph)
        written: dict[Node, int] = {}
        results: dict[Node, list[int]] = {}  # of bodies
        found = self._found

        def now(x: Node) -> int:
            return number(found[x], written[memory[x]]) if memory[x] in written else found[x]

        for node in graph.nodes:
            if node.op == "placeholder":
                found[node] = given.get(node, 0)
            elif call := call_of(node):
                found[node], results[node] = self._inside(call, now, memory, written)
            elif node.target is operator.getitem and node.args[0] in results:
                found[node] = results[node.args[0]][node.args[1]]
            elif node.op != "output":
                found[node] = self._result(node, now)
            for x in writes(node) if node not in results else ():
                written[memory[x]] = number(written.get(memory[x], 0), found[node])
        return written

    def _result(self, node: Node, now: Any) -> int:
        known = traits(node)
        if known.cuts or node.target is ops.as_part.default:
            return number(name_of(node))  # each rank's own by right
        if only_moves(node) and not makes_one(node):
            return now(node.all_input_nodes[-1])  # where a shard lies is, too
        if makes_one(node):
            if self._axis in axes_of_transfer(self._program.mesh, node):  # type: ignore[arg-type]
                self._transfers += 1
                return number("transfer", self._transfers)
        inputs = [] if known.on_shard is OnShard.SHAPE else map(now, self._read(node))
        return number(self._texts[node], *inputs)

    def _read(self, node: Node) -> Sequence[Node]:
        """Return the inputs that count for a node's number."""
        return node.all_input_nodes

    def _inside(
        self, call: Call, now: Any, memory: Mapping[Node, Node], written: dict[Node, int]
    ) -> tuple[int, list[int]]:
        inside = self.follow(call.body, {x: number("given", now(outer)) for x, outer in call.given.items()})
        for x, outer in call.given.items():
            if x in inside:
                written[memory[outer]] = number("loop", written.get(memory[outer], 0), inside[x])
        results = [
            number("loop", call.rounds, k < call.num_sums, self._found[x] if isinstance(x, Node) else 0)
            for k, x in enumerate(call.results)
        ]
        return number(*results), results


def number(*parts: Any) -> int:
    """Return a number of 63 bits that follows from text and numbers alone, on any machine."""
    text = "\0".join(map(str, parts)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1
