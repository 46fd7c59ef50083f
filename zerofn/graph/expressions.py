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
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from .._torch_compat import FakeTensor, OpOverload, schema_arguments
from ..ops.registry import OnShard
from ..ops.same import digest
from ..sharding.layout import Unit
from .alias import roots, writes
from .edit import bodies
from .loop import LoopCall, body_of, given_to_body, run_loop
from .node_kinds import argument, is_gather, is_ours, traits
from .own_values import axes_of_transfer
from .program import Program, owners, tensor_of
from .verify import _origin

ops, aten = torch.ops.zerofn, torch.ops.aten
# Arguments of transfers that say where this rank is, and of an eager region: which one it is in this process.
_NOT_COMPARED = ("group", "rank", "place", "own", "number")


def expressions(program: Program) -> dict[str, dict[Node, int]]:
    """Return, for each axis of several ranks, the number of each value; see above. Loops' bodies are included."""
    mesh = program.mesh
    axes = [axis.name for axis in mesh.axes if axis.size > 1] if mesh is not None else []
    if not axes:
        return {}
    graphs = [program.gm, *bodies(program.gm)]
    shown = _Shown(program)
    texts = {node: shown(node) for gm in graphs for node in gm.graph.nodes}
    found: dict[str, dict[Node, int]] = {}
    for axis in axes:
        names = dict(zip(program.placeholders, range(len(program.placeholders)), strict=True))
        given = {node: _number("input", k) for node, k in names.items()}
        found[axis] = {}
        _Numbers(program, axis, texts, found[axis]).follow(program.gm, given)
    return found


def text_of(node: Node) -> str:
    """Return an operation with the numbers in it, as errors show it."""
    if node.op == "get_attr":
        return _constant(node)
    given = [_written(x) for x in node.args] + [f"{k}={_written(v)}" for k, v in node.kwargs.items()]
    return f"{_name(node)}({', '.join(given)})"


class _Numbers:
    """Numbers the values of graphs along one axis. `texts`: what is not a tensor in each node."""

    def __init__(self, program: Program, axis: str, texts: Mapping[Node, str], found: dict[Node, int]) -> None:
        self._program, self._axis, self._texts, self._found = program, axis, texts, found
        self._transfers = 0

    def follow(self, gm: GraphModule, given: Mapping[Node, int]) -> dict[Node, int]:
        """Number a graph's values. Return how its memory was written, by the node that made it."""
        graph: Graph = gm.graph
        memory = roots(graph)
        written: dict[Node, int] = {}
        results: dict[Node, list[int]] = {}  # of loops
        found = self._found

        def now(x: Node) -> int:
            return _number(found[x], written[memory[x]]) if memory[x] in written else found[x]

        for node in graph.nodes:
            if node.op == "placeholder":
                found[node] = given.get(node, 0)
            elif node.target is run_loop:
                found[node], results[node] = self._loop(node, now, memory, written)
            elif node.target is operator.getitem and node.args[0] in results:
                found[node] = results[node.args[0]][node.args[1]]
            elif node.op != "output":
                found[node] = self._result(node, now)
            for x in writes(node) if node.target is not run_loop else ():
                written[memory[x]] = _number(written.get(memory[x], 0), found[node])
        return written

    def _result(self, node: Node, now: Any) -> int:
        known = traits(node)
        if known.cuts or node.target is ops.as_part.default:
            return _number(_name(node))  # each rank's own by right
        if known.equal or known.collective == "scatter":
            if self._axis in axes_of_transfer(self._program.mesh, node):  # type: ignore[arg-type]
                self._transfers += 1
                return _number("transfer", self._transfers)
        inputs = [] if known.on_shard is OnShard.SHAPE else map(now, self._read(node))
        return _number(self._texts[node], *inputs)

    def _read(self, node: Node) -> Sequence[Node]:
        """Return the inputs that count for a node's number."""
        return node.all_input_nodes

    def _loop(
        self, loop: Node, now: Any, memory: Mapping[Node, Node], written: dict[Node, int]
    ) -> tuple[int, list[int]]:
        call, body = LoopCall.of(loop), body_of(loop)
        inputs = given_to_body(loop)
        inside = self.follow(body, {x: _number("given", now(outer)) for x, outer in inputs.items()})
        for x, outer in inputs.items():
            if x in inside:
                written[memory[outer]] = _number("loop", written.get(memory[outer], 0), inside[x])
        outputs = next(iter(reversed(body.graph.nodes))).args[0]
        results = [
            _number("loop", call.num_rounds, k < call.num_sums, self._found[x] if isinstance(x, Node) else 0)
            for k, x in enumerate(outputs)
        ]
        return _number(*results), results


class _Shown:
    """Writes what is not a tensor in a node. The lengths of this rank's shards, and of the gathered copies of units,
    count as one length, as ranks with other slices of layers have others.
    """

    def __init__(self, program: Program) -> None:
        pairs = list(zip(program.placeholders, owners(program.state.nodes), strict=False))
        shards = [tensor_of(node) for node, (spec, _) in pairs if spec is not None]
        self._lengths = {x.numel() for x in shards if x is not None and x.dim() == 1}
        self._units = {unit.name: unit for _, unit in owners(program.state.nodes) if unit is not None}
        wholes = {whole: shard for shard, whole, _ in program.copies()}
        self._lengths |= {x.numel() for x in map(tensor_of, wholes) if x is not None}
        found = {node: unit for node, (_, unit) in pairs if unit is not None}
        self._flat: dict[Node, Unit] = {whole: found[shard] for whole, shard in wholes.items()}  # gathered units
        self._shards = found

    def _leaf(self, node: Node) -> str:
        """Return which leaf of a gathered unit a node takes from its flat buffer; "" if it does something else. Where
        it lies there depends on the slices before it.
        """
        first = node.all_input_nodes[0] if node.all_input_nodes else None
        for x, outer in given_to_body(node).items() if node.target is run_loop else ():
            for known in (self._flat, self._shards):
                known.update({x: known[outer]} if outer in known else {})
        if is_gather(node):
            unit = self._units.get(str(argument(node, "unit")))
        elif node.target is ops.as_whole.default:
            unit = self._shards.get(_origin(node))
        else:
            unit = self._flat.get(first)  # type: ignore[arg-type]
        if unit is None:
            return ""
        if node.target is aten.slice.Tensor:
            start = argument(node, "start")
            return next((f"leaf {leaf.index}" for leaf in unit.leaves if leaf.offset == start), "")
        self._flat[node] = unit
        return ""

    def __call__(self, node: Node) -> str:
        if node.op in ("placeholder", "output"):
            return ""
        if node.op == "get_attr":
            return self._constant(node)
        if leaf := self._leaf(node):
            return leaf
        order = {x: k for k, x in enumerate(node.all_input_nodes)}
        ours = is_ours(node)
        draws = "key" in _named(node) and traits(node).on_shard is not OnShard.MAKES  # noise of shards has their places
        given = []
        for name, value in _named(node).items():
            if self._is_place(node, name) or (ours and not draws and not _is_told(value)):
                continue  # whole numbers of ours say where this rank's shard or slice lies
            given.append(f"{name}={self._value(value, order)}")
        value = tensor_of(node) if traits(node).on_shard is OnShard.SHAPE else None
        shape = "" if value is None else self._value(list(value.shape), {})
        return f"{_name(node)}({', '.join(given)}){shape}"

    def _constant(self, node: Node) -> str:
        return _constant(node)

    def _is_place(self, node: Node, name: str) -> bool:
        """Whether an argument may differ, since it says which part of a thing this rank has or takes."""
        return name in _NOT_COMPARED

    def _value(self, value: Any, order: Mapping[Node, int]) -> str:
        if isinstance(value, Node):
            return f"x{order.get(value, '')}"
        if isinstance(value, list | tuple):
            if len(value) == 1 and isinstance(value[0], int) and value[0] in self._lengths:
                return "[length]"
            return f"[{', '.join(self._value(x, order) for x in value)}]"
        return _plain(value)


def _is_told(value: Any) -> bool:
    return isinstance(value, float | bool | str | Node) or (
        isinstance(value, list | tuple) and any(isinstance(x, Node) for x in value)
    )


def _named(node: Node) -> dict[str, Any]:
    if not isinstance(node.target, OpOverload):
        return {**{str(k): x for k, x in enumerate(node.args)}, **node.kwargs}
    names = (argument.name for argument in schema_arguments(node.target))
    return {**dict(zip(names, node.args, strict=False)), **node.kwargs}


def _name(node: Node) -> str:
    name = str(node.target) if isinstance(node.target, OpOverload) else getattr(node.target, "__name__", "")
    return name.removesuffix(".default")


def _constant(node: Node) -> str:
    value = operator.attrgetter(str(node.target))(node.graph.owning_module)
    if not isinstance(value, Tensor) or isinstance(value, FakeTensor):
        return "a constant"
    kind = f"{list(value.shape)} {str(value.dtype).removeprefix('torch.')}"
    number = value.item() if value.numel() == 1 else f"checksum {int(digest(value)[0]) % 2**64:016x}"
    return f"a constant {kind} ({number})"


def _written(value: Any) -> str:
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_written, value))}]"
    return "x" if isinstance(value, Node) else _plain(value)


def _plain(value: Any) -> str:
    if isinstance(value, torch.device):
        return value.type  # its number is the rank's
    if isinstance(value, torch.dtype | torch.layout | torch.memory_format):
        return str(value)
    known = value is None or isinstance(value, int | float | complex | str | slice)
    return repr(value) if known else type(value).__name__


def _number(*parts: Any) -> int:
    """Return a number of 63 bits that follows from text and numbers alone, on any machine."""
    text = "\0".join(map(str, parts)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1
