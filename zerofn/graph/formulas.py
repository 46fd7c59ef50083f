"""What a step computes of a rank's own rows, as numbers: ranks have other rows, and compute the same of them.

The numbers are made as those of `expressions`, with this difference: the batches of all ranks count as one, and which
rows a rank takes of it (indices, bounds, shifts, the keys of its noise) does not count. Along "expert" whole numbers
and constants do not count, either: they may be sizes and slices. Along "context" a rank's attention has a graph of its
own, and along "tensor" ranks have the same rows: `expressions` has what they must compute alike.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from ..comm.mesh import EXPERT, ROWS
from .alias import roots, sources, writes
from .edit import bodies
from .expressions import _name, _named, _number, _Numbers, _Shown
from .loop import body_of, given_to_body, run_loop
from .node_kinds import is_ours
from .program import Program, tensor_of

ops = torch.ops.zerofn
_PLACES = (
    *("start", "end", "step", "index", "indices", "shifts", "key", "offset", "storage_offset", "input_sizes"),
    *("target", "targets"),  # of losses: whole numbers here, as the places of a rank's rows among those of all
)


class OfRows(NamedTuple):
    """The numbers of a step's values along one axis, and which of these values must be the same; see above."""

    numbers: dict[Node, int]
    compared: set[Node]


def formulas(program: Program) -> dict[str, OfRows]:
    """Return, for each axis of several ranks, the numbers of all values, and those that the new state follows from."""
    mesh = program.mesh
    axes = [axis.name for axis in mesh.axes if axis.size > 1 and axis.name in ROWS] if mesh is not None else []
    if not axes or program.new_state is None:
        return {}
    graphs = [program.gm, *bodies(program.gm)]
    reads = _Reads(program)
    names: dict[Node, int] = {x: _number("input", k) for k, x in enumerate(program.placeholders)}
    for x in program.batch_placeholders:
        value = tensor_of(x)
        names[x] = _number("rows", "" if value is None else f"{list(value.shape)} {value.dtype}")
    found: dict[str, OfRows] = {}
    for axis in axes:
        shown = _Formulas(program, sizes=axis != EXPERT)
        texts = {node: shown(node) for gm in graphs for node in gm.graph.nodes}
        numbers: dict[Node, int] = {}
        _NumbersOfRows(program, axis, texts, numbers, reads).follow(program.gm, names)
        found[axis] = OfRows(numbers, reads.needed)
    return found


class _Formulas(_Shown):
    """Writes what is not a tensor in a node, without places. `sizes`: whether whole numbers and constants count."""

    def __init__(self, program: Program, *, sizes: bool) -> None:
        super().__init__(program)
        self._sizes = sizes

    def _is_place(self, node: Node, name: str) -> bool:
        piece = node.target is operator.getitem and name == "1" and bool(sources(node))  # which one of a split
        return piece or name in _PLACES or super()._is_place(node, name)

    def _constant(self, node: Node) -> str:
        return super()._constant(node) if self._sizes else "a constant"

    def _value(self, value: Any, order: Mapping[Node, int]) -> str:
        if not self._sizes and _are_sizes(value):
            return "sizes"
        return super()._value(value, order)


class _NumbersOfRows(_Numbers):
    def __init__(
        self, program: Program, axis: str, texts: Mapping[Node, str], found: dict[Node, int], reads: _Reads
    ) -> None:
        super().__init__(program, axis, texts, found)
        self._reads = reads

    def _read(self, node: Node) -> Sequence[Node]:
        return self._reads.of(node)

    def _result(self, node: Node, now: Any) -> int:
        if self._reads.is_mask(node):
            return _number("a mask")
        given = _named(node)
        if "tensors" in given and not is_ours(node):  # joined: a rank's part may stand anywhere among the others
            rest = {name: value for name, value in given.items() if name != "tensors"}
            inputs = {now(x) for x in node.all_input_nodes}
            return _number(_name(node), len(given["tensors"]), rest, *sorted(inputs))
        return super()._result(node, now)


class _Reads:
    """What counts of the inputs of nodes. `needed`: the values that the new state follows from."""

    def __init__(self, program: Program) -> None:
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
        named = [(name, x) for name, value in _named(node).items() for x in _nodes(value)]
        places = [x for name, x in named if name in _PLACES and not _is_float(x)]
        return [x for x in node.all_input_nodes if x not in places or x in self._of_state]

    def is_mask(self, node: Node) -> bool:
        """Return whether a value says which rows a rank takes, and follows from no input: `arange(n) == rank`."""
        return _dtype(node) is torch.bool and node.op == "call_function" and node not in self._given

    def _spread(self, gm: GraphModule, given: set[Node], found: set[Node]) -> None:
        """Add what follows from `given` to `found`."""
        found |= given
        for node in gm.graph.nodes:
            if node.target is run_loop:
                inside = {x for x, outer in given_to_body(node).items() if outer in found}
                self._spread(body_of(node), inside, found)
            if any(x in found for x in node.all_input_nodes):
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
            if node.target is run_loop:
                self._need_in_body(node)
            self.needed.update(read)
            wanted |= {memory[x] for x in read}

    def _need_in_body(self, loop: Node) -> None:
        body = body_of(loop)
        results = next(iter(reversed(body.graph.nodes))).args[0]
        taken = {x.args[1] for x in loop.users if x in self.needed and x.target is operator.getitem}
        values = [x for k, x in enumerate(results) if k in taken and isinstance(x, Node)]
        self._need(body, values, set(given_to_body(loop)))


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
