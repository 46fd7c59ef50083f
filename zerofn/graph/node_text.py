"""What a node is, as text, but for its tensors: the same on ranks that compute the same."""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from .._torch_compat import FakeTensor, OpOverload
from ..geometry.layout import Unit
from ..ops.registry import OnShard, argument_places
from ..ops.same import digest
from .names import input_behind
from .nested import call_of, graphs_of, is_nested
from .node_kinds import argument, is_gather, is_ours, traits
from .program import Program, owners, tensor_of

ops, aten = torch.ops.zerofn, torch.ops.aten
# Arguments of transfers that say where this rank is, or which blocks of its slices of a unit are coded (none of a unit
# that lies on other stages), and of an eager region: which one it is in this process.
_NOT_COMPARED = ("group", "rank", "place", "own", "codec", "number")


class Argument(NamedTuple):
    """An argument: its name in the schema, its value, and the value as text."""

    name: str
    value: Any
    text: str


class NodeText(NamedTuple):
    """An operation's name, its arguments, and its result's shape where that is all that it makes."""

    name: str
    given: Sequence[Argument] = ()
    shape: str = ""

    def text(self) -> str:
        """Return all of it in one line."""
        return f"{self.name}({', '.join(f'{x.name}={x.text}' for x in self.given)}){self.shape}"


def written(program: Program) -> dict[Node, NodeText]:
    """Return what each node of a step and of the bodies in it is."""
    write = _Writer(program)
    return {node: write(node) for gm in graphs_of(program.gm) for node in gm.graph.nodes}


def text_of(node: Node) -> str:
    """Return an operation with the numbers in it, as errors show it."""
    if node.op == "get_attr":
        return _constant(node)
    given = [_shown(x) for x in node.args] + [f"{k}={_shown(v)}" for k, v in node.kwargs.items()]
    return f"{name_of(node)}({', '.join(given)})"


def name_of(node: Node) -> str:
    """Return an operation's name, without `.default`."""
    name = str(node.target) if isinstance(node.target, OpOverload) else getattr(node.target, "__name__", "")
    return name.removesuffix(".default")


class _Writer:
    """Writes nodes. The lengths of this rank's shards, and of the gathered copies of units, count as one length, as
    ranks with other slices of layers have others.
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

    def __call__(self, node: Node) -> NodeText:
        if node.op in ("placeholder", "output"):
            return NodeText("")
        if node.op == "get_attr":
            return NodeText(_constant(node))
        if leaf := self._leaf(node):
            return NodeText(leaf)
        order = {x: k for k, x in enumerate(node.all_input_nodes)}
        named = _named(node)
        draws = "key" in named and traits(node).on_shard is not OnShard.MAKES  # noise of shards has their places
        if is_ours(node) and not draws:  # whole numbers of ours say where this rank's shard or slice lies
            named = {name: value for name, value in named.items() if _is_told(value)}
        given = [Argument(k, x, self._value(x, order, k)) for k, x in named.items() if k not in _NOT_COMPARED]
        value = tensor_of(node) if traits(node).on_shard is OnShard.SHAPE else None
        return NodeText(name_of(node), given, "" if value is None else self._value(list(value.shape), {}))

    def _leaf(self, node: Node) -> str:
        """Return which leaf of a gathered unit a node takes from its flat buffer; "" if it does something else. Where
        it lies there depends on the slices before it.
        """
        first = node.all_input_nodes[0] if node.all_input_nodes else None
        for x, outer in call.given.items() if (call := call_of(node)) else ():
            for known in (self._flat, self._shards):
                known.update({x: known[outer]} if outer in known else {})
        if is_gather(node):
            unit = self._units.get(str(argument(node, "unit")))
        elif node.target is ops.as_whole.default:
            unit = self._shards.get(input_behind(node))
        else:
            unit = self._flat.get(first)  # type: ignore[arg-type]
        if unit is None:
            return ""
        if node.target is aten.slice.Tensor:
            start = argument(node, "start")
            return next((f"leaf {leaf.index}" for leaf in unit.leaves if leaf.offset == start), "")
        self._flat[node] = unit
        return ""

    def _value(self, value: Any, order: Mapping[Node, int], name: str = "") -> str:
        if isinstance(value, Node):
            return f"x{order.get(value, '')}"
        if isinstance(value, list | tuple):
            is_size = len(value) == 1 and isinstance(value[0], int) and not name.startswith("dim")
            if is_size and value[0] in self._lengths:
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
    return {**dict(zip(argument_places(node.target), node.args, strict=False)), **node.kwargs}


def _constant(node: Node) -> str:
    value = operator.attrgetter(str(node.target))(node.graph.owning_module)
    if isinstance(value, GraphModule) and not any(map(is_nested, node.users)):
        return f"a graph ({hashlib.blake2b(value.code.encode(), digest_size=8).hexdigest()})"
    if not isinstance(value, Tensor) or isinstance(value, FakeTensor):
        return "a constant"
    kind = f"{list(value.shape)} {str(value.dtype).removeprefix('torch.')}"
    number = value.item() if value.numel() == 1 else f"checksum {int(digest(value)[0]) % 2**64:016x}"
    return f"a constant {kind} ({number})"


def _shown(value: Any) -> str:
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_shown, value))}]"
    return "x" if isinstance(value, Node) else _plain(value)


def _plain(value: Any) -> str:
    if isinstance(value, torch.device):
        return value.type  # its number is the rank's
    if isinstance(value, torch.dtype | torch.layout | torch.memory_format):
        return str(value)
    known = value is None or isinstance(value, int | float | complex | str | slice)
    return repr(value) if known else type(value).__name__
