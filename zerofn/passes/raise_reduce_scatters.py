"""Start reduce-scatters as soon as their gradient is complete, and wait for them late."""

from __future__ import annotations

import torch
from torch.fx import Node

from ..graph.alias import is_view, positions
from ..graph.edit import clean, raise_up
from ..graph.node_kinds import casts, is_scatter, wait_of
from ..graph.program import Program

IN_FLIGHT = 2  # reduce-scatters in flight: each holds a unit's whole gradient

ops, aten = torch.ops.zerofn, torch.ops.aten


def raise_reduce_scatters(program: Program) -> None:
    """Move every reduce-scatter, with the copy into its bucket, up to where its last gradient is made.

    Its wait moves down to the first use, or to where the second reduce-scatter after it starts. The transfer then
    overlaps the rest of the backward pass; capture leaves all reduce-scatters at its end.
    """
    gm = program.gm
    graph = gm.graph
    flats: dict[Node, None] = {}
    for node in graph.nodes:
        if node.target is ops.ravel.default or is_scatter(node):
            flats.update(_preparation(node))
            flats[node] = None
    where = positions(graph)
    raise_up(graph, sorted(flats, key=where.__getitem__))
    where = positions(graph)
    starts = sorted(filter(is_scatter, graph.nodes), key=where.__getitem__)
    for k, start in enumerate(starts):
        wait = wait_of(start)
        late = starts[k + IN_FLIGHT : k + IN_FLIGHT + 1]
        target = min([*wait.users, *late], key=where.__getitem__, default=None)
        if target is not None:
            target.prepend(wait)
    clean(gm)


def _preparation(node: Node) -> dict[Node, None]:
    """Return the chain of views, casts and scalings between a ravel and its reduce-scatter."""
    out: dict[Node, None] = {}
    while node.all_input_nodes:
        node = node.all_input_nodes[0]
        if not (is_view(node) or _prepares(node)) or len(node.users) > 1:
            break
        out = {node: None, **out}
        if node.target is ops.ravel.default:
            break
    return out


def _prepares(node: Node) -> bool:
    """Return whether a node only brings a gradient into the form in which it is sent."""
    return casts(node) or node.target is ops.ravel.default or node.target is aten.mul.Tensor
