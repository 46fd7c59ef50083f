"""The next gather starts while the present unit is in use."""

from __future__ import annotations

from torch.fx import GraphModule, Node

from ..graph.alias import positions
from ..graph.edit import CASTS, clean, is_gather, wait_of


def prefetch(gm: GraphModule) -> GraphModule:
    """Start every gather, with the cast of its piece, right after the wait for the gather before it: one unit in
    use, one under way. Moves are local, so the order of transfers is the same on every rank.
    """
    where = positions(gm.graph)
    gathers = sorted(filter(is_gather, gm.graph.nodes), key=where.__getitem__)
    for before, start in zip(gathers, gathers[1:], strict=False):
        target = wait_of(before)
        moved = _with_cast(start)
        if all(where[x] < where[target] for node in moved for x in node.all_input_nodes if x not in moved):
            for node in reversed(moved):
                target.append(node)
    return clean(gm)


def _with_cast(start: Node) -> list[Node]:
    piece = start.all_input_nodes[0]
    return [piece, start] if piece.target in CASTS and len(piece.users) == 1 else [start]
