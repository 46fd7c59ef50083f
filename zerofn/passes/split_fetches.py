"""What lies on a drive is read once for computing with it, and once for updating it."""

from __future__ import annotations

from torch.fx import GraphModule, Node

from ..graph.edit import DECODES, UPDATE, clean, in_place_of, is_fetch, wait_of


def split_fetches(gm: GraphModule) -> GraphModule:
    """Give the update of a piece a read of its own: in between, nobody needs it in memory. Such reads are marked."""
    for start in list(filter(is_fetch, gm.graph.nodes)):
        wait = wait_of(start)
        updates = [x for x in wait.users if _is_update(x)]
        if not updates:
            continue
        if len(updates) == len(wait.users):
            start.meta[UPDATE] = True
            continue
        with gm.graph.inserting_before(updates[0]):
            again = gm.graph.node_copy(start)
            held = gm.graph.node_copy(wait, {start: again}.__getitem__)
        again.meta[UPDATE] = True
        for user in updates:
            user.replace_input_with(wait, held)
    return clean(gm)


def _is_update(node: Node) -> bool:
    """Whether a node is an update rule, or decodes what one updates."""
    return in_place_of(node.target) is not None or (
        node.target in DECODES and any(in_place_of(x.target) is not None for x in node.users))
