"""What a step computes of a rank's own rows, as numbers: ranks have other rows, and compute the same of them.

The numbers are made as those of `expressions`, with this difference: the batches of all ranks count as one, and which
rows a rank takes of it (indices, bounds, shifts, the keys of its noise) does not count. Where ranks have slices, as
along `expert`, whole numbers and constants do not count, either: they may be sizes. Along `context` a rank's attention
has a graph of its own, and along `tensor` ranks have the same rows: `expressions` has what they must compute alike.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from ..comm.axes import kind_of
from .alias import roots, sources, writes
from .nested import Call, call_of
from .node_kinds import is_ours
from .node_text import Argument, NodeText
from .program import Program, tensor_of
from .value_numbers import Numbers, number

ops = torch.ops.zerofn
_PLACES = (
    *("start", "end", "step", "index", "indices", "shifts", "key", "offset", "storage_offset", "input_sizes"),
    *("target", "targets"),  # of losses: whole numbers here, as the places of a rank's rows among those of all
)
_JOINED = (*_PLACES, "tensors")  # of torch's operations: how many are joined is counted by `_Reads.joined`


class LocalNumbers(NamedTuple):
    """The numbers of a step's values along one axis, and which of these values must be the same; see above."""

    numbers: dict[Node, int]
    compared: set[Node]


def formulas(program: Program, nodes: Mapping[Node, NodeText]) -> dict[str, LocalNumbers]:
    """Return, for each axis of several ranks, the numbers of all values of a training step, and those that its new
    state follows from.

    `nodes`: what each node is, from `written`.
    """
    mesh = program.mesh
    axes = [axis.name for axis in mesh.axes if axis.size > 1 and axis.kind.rows] if mesh is not None else []
    if not axes:
        return {}
    reads = _Reads(program, nodes)
    names: dict[Node, int] = {x: number("input", k) for k, x in enumerate(program.placeholders)}
    for x in program.batch_placeholders:
        value = tensor_of(x)
        names[x] = number("rows", "" if value is None else f"{list(value.shape)} {value.dtype}")
    found: dict[str, LocalNumbers] = {}
    texts: dict[bool, dict[Node, str]] = {}  # by whether sizes count
    for axis in axes:
        sizes = not kind_of(axis).slices
        if sizes not in texts:
            texts[sizes] = {node: _text(node, x, sizes) for node, x in nodes.items()}
        numbers: dict[Node, int] = {}
        _NumbersOfRows(program, axis, texts[sizes], numbers, reads).follow(program.gm, names)
        found[axis] = LocalNumbers(numbers, reads.needed)
    return found


def _text(node: Node, what: NodeText, sizes: bool) -> str:
    """Return a node as text, without places. `sizes`: whether whole numbers and constants count."""
    if node.op == "get_attr" and not sizes:
        return "a constant"
    left_out: tuple[str, ...] = _PLACES if is_ours(node) else _JOINED
    if node.target is operator.getitem and sources(node):
        left_out = ("1",)  # which piece of a split
    given = [x for x in what.given if x.name not in left_out]
    if not sizes:
        given = [Argument(x.name, x.value, "sizes") if _are_sizes(x.value) else x for x in given]
    return NodeText(what.name, given, what.shape).text()


class _NumbersOfRows(Numbers):
    def __init__(
        self, program: Program, axis: str, texts: Mapping[Node, str], found: dict[Node, int], reads: _Reads
    ) -> None:
        super().__init__(program, axis, texts, found)
        self._reads = reads

    def _read(self, node: Node) -> Sequence[Node]:
        return self._reads.of(node)

    def _result(self, node: Node, now: Any) -> int:
        if self._reads.is_mask(node):
            return number("a mask")
        if parts := self._reads.joined(node):  # a rank's part may stand anywhere among the others
            return number(self._texts[node], parts, *sorted({now(x) for x in node.all_input_nodes}))
        return super()._result(node, now)


class _Reads:
    """What counts of the inputs of nodes. `needed`: the values that the new state follows from."""

    def __init__(self, program: Program, nodes: Mapping[Node, NodeText]) -> None:
        self._nodes = nodes
        batch = set(program.batch_placeholders)
        self._of_state: set[Node] = set()
        self._given: set[Node] = set()
        self._found: dict[Node, list[Node]] = {}  # what `of` has returned: every axis asks again
        self._spread(program.gm, {x for x in program.placeholders if x not in batch}, self._of_state)
        self._spread(program.gm, set(program.placeholders), self._given)
        self.needed: set[Node] = set()
        outputs: Any = program.output.args[0]
        self._need(program.gm, [x for x in outputs[: program.num_new] if isinstance(x, Node)], set())

    def of(self, node: Node) -> list[Node]:
        """Return the inputs of a node, but for what says which rows it takes, unless that follows from the state."""
        if node not in self._found:
            self._found[node] = [] if self.is_mask(node) else self._without_places(node)
        return self._found[node]

    def _without_places(self, node: Node) -> list[Node]:
        given = [x.value for x in self._nodes[node].given if x.name in _PLACES]
        places = [x for value in given for x in _nodes(value) if not _is_float(x)]
        return [x for x in node.all_input_nodes if x not in places or x in self._of_state]

    def joined(self, node: Node) -> int:
        """Return how many tensors a node joins: 0 if it does something else."""
        joined = () if is_ours(node) else (len(x.value) for x in self._nodes[node].given if x.name == "tensors")
        return next(iter(joined), 0)

    def is_mask(self, node: Node) -> bool:
        """Return whether a value says which rows a rank takes, and follows from no input: `arange(n) == rank`."""
        return _dtype(node) is torch.bool and node.op == "call_function" and node not in self._given

    def _spread(self, gm: GraphModule, given: set[Node], found: set[Node]) -> None:
        """Add what follows from `given` to `found`."""
        found |= given
        for node in gm.graph.nodes:
            if call := call_of(node):
                self._spread(call.body, {x for x, outer in call.given.items() if outer in found}, found)
            if not found.isdisjoint(node.all_input_nodes):
                found.update([node, *writes(node)])

    def _need(self, gm: GraphModule, values: Sequence[Node], outside: set[Node]) -> None:
        """Add what these values of a graph follow from. `outside`: memory from outside, whose every write counts."""
        memory = roots(gm.graph)
        wanted = outside | {memory[x] for x in values}
        self.needed.update(values)
        for node in reversed(gm.graph.nodes):
            if node not in self.needed and not any(memory[x] in wanted for x in writes(node)):
                continue
            self.needed.add(node)
            read = self.of(node)
            if call := call_of(node):
                self._need_in_body(node, call)
            self.needed.update(read)
            wanted |= {memory[x] for x in read}

    def _need_in_body(self, node: Node, call: Call) -> None:
        taken = {x.args[1] for x in node.users if x in self.needed and x.target is operator.getitem}
        values = [x for k, x in enumerate(call.results) if k in taken and isinstance(x, Node)]
        self._need(call.body, values, set(call.given))


def _dtype(node: Node) -> torch.dtype | None:
    value = tensor_of(node)
    return None if value is None else value.dtype


def _is_float(node: Node) -> bool:
    dtype = _dtype(node)
    return dtype is not None and dtype.is_floating_point


def _are_sizes(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return bool(value) and all(map(_are_sizes, value))
    return isinstance(value, int) and not isinstance(value, bool)


def _nodes(value: Any) -> list[Node]:
    found: list[Node] = []
    map_arg(value, found.append)
    return found
