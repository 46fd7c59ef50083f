"""Local edits: a node moves only as far as its inputs, its users and writers to its memory allow."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from .._torch_compat import LazyGraphModule, OpOverload, make_fx
from .alias import is_view, positions, roots, writes, written_before, written_memory
from .nested import calls
from .node_kinds import argument, casts, decodes, fetched, is_fetch, is_gather, lies_at, start_of, stores, traits

ops = torch.ops.zerofn
_impure: dict[OpOverload, bool] = {}


def weight_chain(graph: Graph) -> list[Node]:
    """Return, in order, the nodes that only fetch parameters.

    These are reads from drives and the host, gathers, their waits, and the casts, decodings and views around them.
    Nodes whose memory is written anywhere are excluded: for them it matters when, and how often, they run.
    """
    chain: dict[Node, None] = {}
    root = roots(graph)
    written = written_memory(root)
    for node in graph.nodes:
        if node.op != "call_function" or not node.all_input_nodes or root[node] in written:
            continue
        if not all(x in chain or (x.op == "placeholder" and x not in written) for x in node.all_input_nodes):
            continue
        chained = any(x in chain for x in node.all_input_nodes)
        if is_gather(node) or is_fetch(node) or (chained and is_view(node)) or _prepares(node):
            chain[node] = None
    return list(chain)


def _prepares(node: Node) -> bool:
    """Return whether a node casts, views or decodes inputs of the graph, fetched values, or decoded ones."""
    from_inputs = all(x.op == "placeholder" or fetched(x) for x in node.all_input_nodes)
    from_decoded = all(map(decodes, node.all_input_nodes))
    return (from_inputs or from_decoded) and (casts(node) or decodes(node) or is_view(node))


def sink(graph: Graph, nodes: Iterable[Node]) -> None:
    """Move each of `nodes` down to just before its first user that is not one of them; their order stays the same.

    A read from a drive or the host also stays above each store that overwrites what it reads.
    """
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
    """Move each of `nodes` up to just after its last input; their order stays the same.

    The nodes must not write. A node also stays below the last earlier write to the memory that it reads.
    """
    where, order = positions(graph), list(nodes)
    writer = written_before(graph, where, roots(graph))
    anchor: dict[Node, Node] = {}
    first = next(iter(graph.nodes))  # an input: what has no inputs itself goes behind them all
    for node in order:
        after = [first] + [anchor.get(x, x) for x in node.all_input_nodes]
        if node in writer:
            after.append(writer[node])
        anchor[node] = max(after, key=where.__getitem__)
    inputs = behind(first)
    for node in reversed(order):
        (inputs if anchor[node].op == "placeholder" else anchor[node]).append(node)


def sums_of(graph: Graph, terms: Iterable[Node]) -> list[Node]:
    """Return, in order, the additions of `terms` alone, of views and casts of them, and of such sums, with these views
    and casts.
    """
    known = dict.fromkeys(terms)
    for node in graph.nodes:
        inputs = node.all_input_nodes
        if inputs and all(x in known for x in inputs) and (_adds(node) or is_view(node) or casts(node)):
            known[node] = None
    found: dict[Node, None] = {}
    todo = [x for x in known if _adds(x)]
    while todo:
        node = todo.pop()
        if node in known and node not in found:
            found[node] = None
            todo += node.all_input_nodes
    where = positions(graph)
    return sorted(found.keys() - set(terms), key=where.__getitem__)


def _adds(node: Node) -> bool:
    return node.target is torch.ops.aten.add.Tensor


def behind(node: Node) -> Node:
    """Return the node after which to insert a node that must follow `node`.

    For an input, that is the last input: all inputs come first in a graph.
    """
    return [n for n in node.graph.nodes if n.op == "placeholder"][-1] if node.op == "placeholder" else node


def merge_equal(nodes: Iterable[Node]) -> None:
    """Of nodes, in order, let the first of those with the same operation and arguments stand for all, and erase the
    others. What they read must be the same wherever they stand.
    """
    alone: dict[Any, Node | None] = {}  # by what is cheap to compare; None where there are several
    seen: dict[Any, Node] = {}
    for node in nodes:
        inputs = node.target, *node.all_input_nodes
        other = alone.setdefault(inputs, node)
        if other is node:
            continue
        if other is not None:
            seen[_call(other)], alone[inputs] = other, None
        first = seen.setdefault(_call(node), node)
        if first is not node:
            node.replace_all_uses_with(first)
            node.graph.erase_node(node)


def _call(node: Node) -> Any:
    return node.target, frozen(node.args), frozen(node.kwargs)


def frozen(value: Any) -> Any:
    """Return arguments of nodes so that they can be hashed, and that equal ones are equal."""
    if isinstance(value, list | tuple):
        return tuple(map(frozen, value))
    if isinstance(value, dict):
        return tuple((k, frozen(v)) for k, v in sorted(value.items()))
    return type(value), value  # 1, 1.0 and True are equal


def copy_of(value: Node) -> Node:
    """Insert a clone of a value at its graph's insertion point, and return it."""
    node = value.graph.call_function(torch.ops.aten.clone.default, (value,))
    node.meta["val"] = value.meta.get("val")
    return node


def recorded(run: Callable[[Sequence[Tensor]], Sequence[Tensor]], values: Sequence[Node]) -> list[Node]:
    """Insert what `run` does to tensors, at the insertion point of the graph of `values`, and return its results."""
    graph = values[0].graph
    # Detached, since nodes that make the same kind of tensor may share a fake value, and recording goes by identity.
    gm = make_fx(lambda *xs: list(run(xs)))(*[x.meta["val"].detach() for x in values])
    inputs = [x for x in gm.graph.nodes if x.op == "placeholder"]
    results: Any = graph.graph_copy(gm.graph, dict(zip(inputs, values, strict=True)))
    return list(results)


def made_by(buffer: Node, target: OpOverload, *args: Any) -> Node:
    """Replace the node that makes a unit's bucket, and return the new node, `target(*args)`.

    `buffer`: a `flat`, or a `ravel` without batch dimensions, whose leaves are then copied into the new bucket.
    """
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
    """Erase nodes without users, unless they write, and generate the module's code again."""
    # `Graph.eliminate_dead_code` spends half of its time on a lint. The passes lint once, at the end.
    for node in reversed(gm.graph.nodes):
        if not node.users and not _is_impure(node):
            gm.graph.erase_node(node)
    gm.recompile()
    return gm


def _is_impure(node: Node) -> bool:
    """Return whether a node has an effect without users: it writes, waits for a transfer into existing memory, or for
    what it sends to one rank.
    """
    target = node.target
    if not isinstance(target, OpOverload):
        return node.is_impure() or bool(writes(node))
    if target is ops.wait.default:
        start = argument(node, "x")
        return start.op == "placeholder" or traits(start).collective == "send"
    if target not in _impure:
        _impure[target] = node.is_impure()
    return _impure[target] or bool(writes(node))


def copied(gm: GraphModule) -> GraphModule:
    """Return a copy of a graph with its bodies. Constants are the same tensors."""
    new = LazyGraphModule(gm, copy.deepcopy(gm.graph))
    new.meta.update(gm.meta)
    for name, body in {call.name: call.body for _, call in calls(new)}.items():
        setattr(new, name, copied(body))
    return new
