"""Turn writes to the step's own memory into new values."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from .._torch_compat import OpOverload, schema_arguments
from ..graph.alias import is_given, is_view, roots, touches, writes, written_memory
from ..graph.edit import clean
from ..graph.liveness import complete_values, values_of
from ..graph.node_kinds import argument
from ..graph.program import alike, tensor_of
from ..ops.registry import base_name
from ._context import Context

aten = torch.ops.aten


def functionalize(gm: GraphModule, context: Context) -> None:
    """Replace in-place operations by pure ones, if no other node sees the memory that they write.

    An example is dropout's mask: it is drawn into an empty tensor and scaled in place. `recompute_activations` can
    recompute only pure values. Later `reinplace` writes in place again where that is free. An operation that gives a
    tensor another shape in place (`transpose_`) writes no memory: it becomes a view.
    """
    complete_values(gm.graph)
    root = roots(gm.graph)
    _replace_views_in_place(gm.graph, root)
    touched, changes = touches(gm.graph, root), written_memory(root)
    for memory in [n for n in gm.graph.nodes if root[n] is n and _is_aten(n)]:
        written = [n for n in touched[memory] if memory in map(root.__getitem__, writes(n))]
        pure = {n: _pure(n, lambda x: root[x] not in changes) for n in written}
        if written and all(pure.values()) and _is_alone(touched[memory], written):
            _replace(gm.graph, touched[memory], pure)
    clean(gm)


def _replace_views_in_place(graph: Graph, root: Mapping[Node, Node]) -> None:
    """Later nodes read what such an operation returns, and never its input. So the input may keep its shape, unless it
    is the caller's tensor. Both share the same memory, so `root` stays as it is.
    """
    for node in graph.nodes:
        if _is_aten(node) and torch.Tag.inplace_view in node.target.tags and not is_given(root[node]):
            node.target = _out_of_place(node.target, is_view=True) or node.target


def _is_aten(node: Node) -> bool:
    return isinstance(node.target, OpOverload) and node.target.namespace == "aten"


def _is_alone(touched: list[Node], written: list[Node]) -> bool:
    """Return whether memory is only written as a whole, and has no view before its last write."""
    before = touched[: touched.index(written[-1])]
    return not any(map(is_view, before)) and all(writes(n) == [n.all_input_nodes[0]] for n in written)


def _pure(node: Node, stays: Callable[[Node], bool]) -> Any:
    """Return the pure operation that computes the value that `node` writes; None if there is none.

    For a copy whose source `stays` unchanged, return "given": readers may read the source instead.
    """
    value, given = tensor_of(node.all_input_nodes[0]), values_of(node)[0]
    if not _is_aten(node) or node.kwargs or value is None or not hasattr(value, "fake_mode"):
        return None
    if node.target is aten.copy_.default:
        source: Any = argument(node, "src")
        return "given" if alike(value, given[1]) and len(source.users) == 1 and stays(source) else None
    pure = _out_of_place(node.target)
    if pure is None:
        return None
    with value.fake_mode:
        return pure if alike(value, pure(*given)) else None


@functools.cache
def _out_of_place(op: OpOverload, is_view: bool = False) -> OpOverload | None:
    """Return the operation that computes what an in-place one makes of its first argument, from the same arguments.

    Overloads of one name may take other arguments: `pow_.Scalar` raises a tensor to a number, `pow.Scalar` a number to
    a tensor. So schemas are compared.
    """
    name = base_name(op)
    packet = getattr(aten, name[:-1], None) if name.endswith("_") and not name.endswith("__") else None
    for overload in () if packet is None else packet.overloads():
        found = getattr(packet, overload)
        is_value = [str(x.type) for x in found._schema.returns] == ["Tensor"] and found.is_view == is_view
        if is_value and not found._schema.is_mutable and _parameters(found) == _parameters(op):
            return found
    return None


def _parameters(op: OpOverload) -> list[tuple[str, str, bool]]:
    """Return name, type and whether it is given by name of each argument."""
    return [(x.name, str(x.type), x.kwarg_only) for x in schema_arguments(op)]


def _replace(graph: Graph, touched: list[Node], pure: dict[Node, Any]) -> None:
    """Let every node read the value that was current when it ran."""
    now = touched[0]
    stands = {now}
    for node in touched[1:]:
        for x in node.all_input_nodes:
            if x in stands:
                node.replace_input_with(x, now)
        if node in pure:
            now = argument(node, "src") if pure[node] == "given" else _call(graph, node, pure[node])
            stands.add(now)
            node.replace_all_uses_with(now)
            graph.erase_node(node)


def _call(graph: Graph, node: Node, pure: Callable[..., Any]) -> Node:
    with graph.inserting_before(node):
        new = graph.call_function(pure, node.args)
    new.meta.update(node.meta)
    return new
