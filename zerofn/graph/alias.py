"""Which nodes share memory, and which nodes write it."""

from __future__ import annotations

import operator
from collections.abc import Iterable

import torch
from torch.fx import Graph, GraphModule, Node

from .._torch_compat import OpOverload, aliased_arguments, schema_arguments
from ..loop import run_loop

aten = torch.ops.aten
# Batch norms that write their running values in training, which their schemas do not say.
_UNDECLARED = {
    packet.default: ("running_mean", "running_var")
    for packet in (aten.native_batch_norm, aten.cudnn_batch_norm, aten.miopen_batch_norm, aten.batch_norm_update_stats,
                   aten.batch_norm_gather_stats, aten.batch_norm_gather_stats_with_counts)
}
_views: dict[OpOverload, list[tuple[int, str]]] = {}


def sources(node: Node) -> list[Node]:
    """The nodes whose memory `node`'s value shares: empty for fresh memory."""
    if node.op != "call_function":
        return []
    if node.target is operator.getitem:
        first = node.args[0]
        return sources(first) if isinstance(first, Node) else []
    if not isinstance(node.target, OpOverload):
        return []
    if node.target not in _views:
        _views[node.target] = aliased_arguments(node.target)
    found = [node.args[i] if i < len(node.args) else node.kwargs.get(name) for i, name in _views[node.target]]
    return [x for x in found if isinstance(x, Node)]


def is_view(node: Node) -> bool:
    """Whether `node` only looks at memory another node has."""
    return bool(sources(node)) and not writes(node)


def writes(node: Node) -> list[Node]:
    """The arguments `node` writes to; a loop writes what its body does."""
    if node.target is run_loop:
        return _written_by_loop(node)
    if node.op != "call_function" or not isinstance(node.target, OpOverload):
        return []
    target = node.target
    if target in _UNDECLARED:
        given = {a.name: x for a, x in zip(schema_arguments(target), node.args, strict=False)}
        found = [given.get(name) for name in _UNDECLARED[target]] if given.get("training", True) else []
        return [x for x in found if isinstance(x, Node)]
    if not target._schema.is_mutable:
        return []
    out: list[Node] = []
    for k, argument in enumerate(schema_arguments(target)):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        value = node.args[k] if k < len(node.args) else node.kwargs.get(argument.name)
        out.extend(x for x in (value if isinstance(value, list | tuple) else [value]) if isinstance(x, Node))
    return out


def body_of(node: Node) -> GraphModule:
    """The graph a loop node repeats."""
    module = node.graph.owning_module
    return module.get_submodule(str(node.args[0].target))  # type: ignore[union-attr,return-value]


def given_to_body(node: Node) -> dict[Node, Node]:
    """The inputs of a loop's body -> what the loop gives them, whole or row by row; the index is given by none."""
    inputs = [x for x in body_of(node).graph.nodes if x.op == "placeholder"]
    return dict(zip(inputs[1:], [*node.args[2], *node.args[3]], strict=True))  # type: ignore[misc]


def _written_by_loop(node: Node) -> list[Node]:
    if "writes" not in node.meta:
        body = body_of(node)
        root = roots(body.graph)
        inputs = [x for x in body.graph.nodes if x.op == "placeholder"]
        written = {root[w] for x in body.graph.nodes for w in writes(x)}
        node.meta["writes"] = [i for i, x in enumerate(reversed(inputs)) if x in written]
    closed = list(reversed(node.args[3]))  # type: ignore[arg-type]
    return [closed[i] for i in node.meta["writes"]]


def roots(graph: Graph) -> dict[Node, Node]:
    """Every node -> the node that made the memory it stands on."""
    found: dict[Node, Node] = {}
    for node in graph.nodes:
        source = sources(node)
        found[node] = found[source[0]] if source else node
    return found


def positions(graph: Graph) -> dict[Node, int]:
    """Node -> its place in the order of execution."""
    return {node: i for i, node in enumerate(graph.nodes)}


def last_uses(graph: Graph, where: dict[Node, int], root: dict[Node, Node]) -> dict[Node, int]:
    """Memory -> the position of the last node that touches it, through any view."""
    last: dict[Node, int] = {}
    for node in graph.nodes:
        for used in (node, *node.all_input_nodes):
            last[root[used]] = max(last.get(root[used], -1), where[node])
    return last


def any_written(nodes: Iterable[Node]) -> set[Node]:
    """All nodes that some node of `nodes` writes to."""
    return {x for node in nodes for x in writes(node)}
