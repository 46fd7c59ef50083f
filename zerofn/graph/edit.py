"""Local edits: nodes move, one at a time, only as far as their inputs, users and writers allow."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from .._torch_compat import LazyGraphModule, OpOverload
from .alias import is_view, positions, roots, writes, written_before, written_memory
from .loop import LoopCall, body_of, run_loop
from .node_kinds import argument, casts, decodes, fetched, is_fetch, is_gather, lies_at, start_of, stores

ops = torch.ops.zerofn
_impure: dict[OpOverload, bool] = {}


def loops(gm: GraphModule) -> list[tuple[Node, GraphModule]]:
    """(node, body) of every loop."""
    return [(n, body_of(n)) for n in gm.graph.nodes if n.target is run_loop]


def bodies(gm: GraphModule) -> list[GraphModule]:
    """The bodies of all loops, and of loops inside these, each once: a loop may be computed again."""
    return list(dict.fromkeys(each for _, body in loops(gm) for each in (body, *bodies(body))))


def give_to_loop(loop: Node, old: Node, new: Node) -> None:
    """Let a loop give `new` to its body wherever it gave `old`."""
    loop.args = tuple([new if x is old else x for x in a] if isinstance(a, list | tuple) else a for a in loop.args)


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
        chained = any(x in chain for x in node.all_input_nodes)
        if is_gather(node) or is_fetch(node) or (chained and is_view(node)) or _prepares(node):
            chain[node] = None
    return list(chain)


def _prepares(node: Node) -> bool:
    """A cast, a view, or what is decoded, of whole placeholders, or of what was read from a drive."""
    given = all(x.op == "placeholder" or fetched(x) for x in node.all_input_nodes)
    joined = all(map(decodes, node.all_input_nodes))
    return (given or joined) and (casts(node) or decodes(node) or is_view(node))


def sink(graph: Graph, nodes: Iterable[Node]) -> None:
    """Move each of `nodes` to just before the first node outside that needs it, or writes over what it reads from a
    drive or the host, keeping their mutual order."""
    where, order = positions(graph), list(nodes)
    inside = set(order)
    anchor: dict[Node, Node] = {}
    for node in reversed(order):
        users = [anchor.get(u, u) if u in inside else u for u in node.users]
        start = start_of(node)
        if start is not None and is_fetch(start):
            users += filter(stores, lies_at(start).users)
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
    inputs = behind(next(iter(graph.nodes)))
    for node in reversed(order):
        (inputs if anchor[node].op == "placeholder" else anchor[node]).append(node)


def behind(node: Node) -> Node:
    """Where what comes right after `node` is put: after the last input for an input, so that all of them are there
    for what other passes put before it."""
    return [n for n in node.graph.nodes if n.op == "placeholder"][-1] if node.op == "placeholder" else node


def copy_of(value: Node) -> Node:
    """A clone of a value, where its graph inserts now."""
    node = value.graph.call_function(torch.ops.aten.clone.default, (value,))
    node.meta["val"] = value.meta.get("val")
    return node


def made_by(buffer: Node, target: OpOverload, *args: Any) -> Node:
    """Let another operation make the memory of a unit's flat gradient: of `flat`, or of a `ravel` without batch
    dimensions, whose leaves are copied there."""
    graph = buffer.graph
    with graph.inserting_before(buffer):
        made = graph.call_function(target, args)
        made.meta.update(buffer.meta)
        if buffer.target is ops.ravel.default:
            leaves, offsets = argument(buffer, "leaves"), argument(buffer, "offsets")
            numels = [0 if x is None else x.meta["val"].numel() for x in leaves]
            graph.call_function(ops.fill_.default, (made, leaves, offsets, numels, [False] * len(leaves)))
    buffer.replace_all_uses_with(made)
    graph.erase_node(buffer)
    return made


def clean(gm: GraphModule) -> GraphModule:
    """Drop nodes nobody uses, and make its code anew."""
    # As `Graph.eliminate_dead_code`, which checks the graph first: half of its time. The passes do that at last.
    for node in reversed(gm.graph.nodes):
        if not node.users and not _is_impure(node):
            gm.graph.erase_node(node)
    gm.recompile()
    return gm


def _is_impure(node: Node) -> bool:
    """What writes matters without users, and so do waits for transfers into memory that was there before."""
    target = node.target
    if not isinstance(target, OpOverload):
        return node.is_impure() or bool(writes(node))
    if target is ops.wait.default:
        return argument(node, "x").op == "placeholder"
    if target not in _impure:
        _impure[target] = node.is_impure()
    return _impure[target] or bool(writes(node))


def copied(gm: GraphModule) -> GraphModule:
    """A graph of its own, with its loops' bodies; constants are the same tensors."""
    new = LazyGraphModule(gm, copy.deepcopy(gm.graph))
    new.meta.update(gm.meta)
    for node, body in loops(new):
        setattr(new, str(LoopCall.of(node).body.target), copied(body))
    return new
