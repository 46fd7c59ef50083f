"""Start reduce-scatters as soon as their gradient is complete, and wait for them late."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch.fx import Graph, GraphModule, Node

from ..graph.alias import is_view, positions
from ..graph.edit import clean, raise_up, sums_of
from ..graph.node_kinds import casts, is_gather, is_scatter, is_start, start_of, wait_of
from ._context import Context

IN_FLIGHT = 2  # reduce-scatters in flight: each holds a unit's whole gradient

ops, aten = torch.ops.zerofn, torch.ops.aten


def raise_reduce_scatters(gm: GraphModule, context: Context) -> None:
    """Move every reduce-scatter, with the copy into its bucket, up to where its last gradient is made.

    Its wait moves down to the first use, or to where the second reduce-scatter after it starts. The transfer then
    overlaps the rest of the backward pass; capture leaves all reduce-scatters at its end. On a mesh with replicas, what
    was reduced among some ranks is then reduced across the others, and gathered across them again: each of these
    transfers starts behind the wait for the one before, and is waited for as late. What was reduced in several parts is
    added up behind the waits. With error feedback, what is added before and left out behind moves along.
    """
    graph = gm.graph
    first = [node for node in graph.nodes if node.target is ops.ravel.default or is_scatter(node)]
    across = [node for node in first if is_scatter(node) and _reduced_by(node) is not None]
    back = [node for node in graph.nodes if is_gather(node) and _reduced_by(node) in across]
    for nodes in ([node for node in first if node not in across], across, back):
        _raise(graph, nodes)
    raise_up(graph, sums_of(graph, [wait_of(node) for node in first if is_scatter(node)]))
    clean(gm)


def _raise(graph: Graph, nodes: Sequence[Node]) -> None:
    """Move transfers, and the copies into buckets, up with what prepares them, and waits for transfers down."""
    flats: dict[Node, None] = {}
    for node in nodes:
        fed_back = _fed_back(node)
        flats.update(_preparation(node, fed_back))
        flats[node] = None
        flats.update(fed_back)
    where = positions(graph)
    raise_up(graph, sorted(flats, key=where.__getitem__))
    where = positions(graph)
    starts = sorted(filter(is_start, nodes), key=where.__getitem__)
    for k, start in enumerate(starts):
        wait = wait_of(start)
        late = starts[k + IN_FLIGHT : k + IN_FLIGHT + 1]
        target = min([*wait.users, *late], key=where.__getitem__, default=None)
        if target is not None:
            target.prepend(wait)


def _reduced_by(node: Node) -> Node | None:
    """Return the reduce-scatter whose result a transfer sends; None if it sends something else."""
    while node.all_input_nodes:
        node = node.all_input_nodes[0]
        start = start_of(node)
        if start is not None:
            return start if is_scatter(start) else None
        if not (is_view(node) or casts(node)):
            break
    return None


def _fed_back(start: Node) -> dict[Node, None]:
    """Return what is added to what a reduce-scatter sends, of what was left out before, and what is left out now."""
    sent = start.all_input_nodes[0]
    rounded = [x for x in sent.users if x.target is ops.rounded.default]
    if not is_scatter(start) or sent.target is not aten.add.Tensor or not rounded:
        return {}
    scaled = [x for x in sent.all_input_nodes[1:] if x.target is aten.mul.Tensor]
    left = [x for node in rounded for x in node.users if x.target is aten.sub.Tensor]
    return dict.fromkeys([*scaled, *rounded, *left])


def _preparation(node: Node, fed_back: Mapping[Node, None]) -> dict[Node, None]:
    """Return the chain of views, casts and scalings between a ravel and its reduce-scatter, and the sum with what was
    left out before.
    """
    out: dict[Node, None] = {}
    sent = node.all_input_nodes[0] if fed_back else None
    while node.all_input_nodes:
        node = node.all_input_nodes[0]
        waits = start_of(node) is not None  # a wait counts as a view, and is to stay late
        prepares = node is sent or (is_view(node) or _prepares(node)) and len(node.users) == 1
        if waits or not prepares:
            break
        out = {node: None, **out}
        if node.target is ops.ravel.default:
            break
    return out


def _prepares(node: Node) -> bool:
    """Return whether a node only brings a gradient into the form in which it is sent."""
    return casts(node) or node.target is ops.ravel.default or node.target is aten.mul.Tensor
