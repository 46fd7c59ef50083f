"""Local edits: nodes move, one at a time, only as far as their inputs, users and writers allow."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch.fx import Graph, GraphModule, Node

from ..loop import run_loop
from .alias import body_of, is_view, positions, roots, writes, written_before, written_memory

ops = torch.ops.zerofn
GATHERS = (ops.all_gather.default,)
SCATTERS = (ops.reduce_scatter.default,)
STARTS = (*GATHERS, *SCATTERS, ops.exchange.default, ops.permute.default, ops.refresh_.default)
# What decodes a piece -> what encodes it.
DECODES = {ops.join.default: ops.split.default, ops.decode.default: ops.encode.default}
CASTS = (torch.ops.aten._to_copy.default, ops.high.default)


def is_start(node: Node) -> bool:
    """Whether `node` starts a transfer."""
    return node.target in STARTS


def is_gather(node: Node) -> bool:
    """Whether `node` starts the gather of a unit (transfers of small values carry no unit)."""
    return node.target in GATHERS and bool(node.args[3])


def is_scatter(node: Node) -> bool:
    """Whether `node` starts the reduce-scatter of a unit."""
    return node.target in SCATTERS and bool(node.args[3])


def loops(gm: GraphModule) -> list[tuple[Node, GraphModule]]:
    """(node, body) of every loop."""
    return [(n, body_of(n)) for n in gm.graph.nodes if n.target is run_loop]


def wait_of(start: Node) -> Node:
    """The node that waits for `start`."""
    return next(user for user in start.users if user.target is ops.wait.default)


def weight_chain(graph: Graph) -> list[Node]:
    """Nodes that only fetch parameters, in order: gathers, their waits, casts before them and views after them.

    None that reads, or stands on, memory that anything writes: when it runs, and whether twice, would then matter.
    """
    chain: dict[Node, None] = {}
    root = roots(graph)
    written = written_memory(root)
    for node in graph.nodes:
        if node.op != "call_function" or not node.all_input_nodes or root[node] in written:
            continue
        inputs_ok = all(x in chain or (x.op == "placeholder" and x not in written) for x in node.all_input_nodes)
        if not inputs_ok:
            continue
        fetched = any(x in chain for x in node.all_input_nodes)
        if is_gather(node) or (fetched and is_view(node)) or (not fetched and _is_fetch(node)):
            chain[node] = None
    return list(chain)


def _is_fetch(node: Node) -> bool:
    """A cast, a view, or what is decoded, of whole placeholders."""
    return node.target in CASTS or node.target in DECODES or is_view(node)


def sink(graph: Graph, nodes: Iterable[Node]) -> None:
    """Move each of `nodes` to just before the first node outside that needs it, keeping their mutual order."""
    where, order = positions(graph), list(nodes)
    inside = set(order)
    anchor: dict[Node, Node] = {}
    for node in reversed(order):
        users = [anchor.get(u, u) if u in inside else u for u in node.users]
        if users:
            anchor[node] = min(users, key=where.__getitem__)
    for node in order:
        if node in anchor:
            anchor[node].prepend(node)


def raise_up(graph: Graph, nodes: Iterable[Node]) -> None:
    """Move each of `nodes`, which write nothing, to just after the last of its inputs and of what writes to their
    memory before it, keeping their mutual order."""
    where, order = positions(graph), list(nodes)
    writer = written_before(graph, where, roots(graph))
    anchor: dict[Node, Node] = {}
    for node in order:
        after = [anchor.get(x, x) for x in node.all_input_nodes]
        if node in writer:
            after.append(writer[node])
        anchor[node] = max(after, key=where.__getitem__)
    for node in reversed(order):
        anchor[node].append(node)


def copy_of(value: Node) -> Node:
    """A clone of a value, where its graph inserts now."""
    node = value.graph.call_function(torch.ops.aten.clone.default, (value,))
    node.meta["val"] = value.meta.get("val")
    return node


def clean(gm: GraphModule) -> GraphModule:
    """Drop nodes nobody uses, check the graph, and make its code anew."""
    gm.graph.eliminate_dead_code(_is_impure)
    gm.graph.lint()
    gm.recompile()
    return gm


def _is_impure(node: Node) -> bool:
    """What writes matters without users, and so do waits for transfers into memory that was there before."""
    waits = node.target is ops.wait.default and node.args[0].op == "placeholder"  # type: ignore[union-attr]
    return waits or node.is_impure() or bool(writes(node))
