"""What lies on a drive is read once for computing with it, and once for updating it."""

from __future__ import annotations

from torch.fx import Graph, GraphModule, Node

from ..graph.alias import given_to_body, positions
from ..graph.edit import DECODES, SPILLS, UPDATE, clean, fetched, give_to_loop, in_place_of, is_fetch, loops, wait_of


def split_state_reads(gm: GraphModule) -> GraphModule:
    """Give the update of a piece a read of its own: in between, nobody needs it in memory. Such reads are marked. What
    a loop computes with is read in each of its rounds.
    """
    for loop, body in loops(gm):
        for inside, given in given_to_body(loop).items():
            if fetched(given):
                _read_inside(loop, body.graph, inside, given)
        clean(body)
    clean(gm)
    where = positions(gm.graph)
    for start in list(filter(is_fetch, gm.graph.nodes)):
        wait = wait_of(start)
        updates, moved = [x for x in wait.users if _is_update(x)], [x for x in wait.users if x.target in SPILLS]
        if moved and len(moved) < len(wait.users):
            _read_again(start, wait, moved, where)
        if updates:
            mine = start if len(updates) == len(wait.users) else _read_again(start, wait, updates, where)
            mine.meta[UPDATE] = True
    return clean(gm)


def _read_again(start: Node, wait: Node, users: list[Node], where: dict[Node, int]) -> Node:
    """Give these users a read of their own; -> its start."""
    with start.graph.inserting_before(min(users, key=where.__getitem__)):
        again = start.graph.node_copy(start)
        held = start.graph.node_copy(wait, {start: again}.__getitem__)
    for user in users:
        user.replace_input_with(wait, held)
    return again


def _read_inside(loop: Node, body: Graph, inside: Node, held: Node) -> None:
    """Give a loop's body the ticket of what was read before it, to read itself."""
    start = held.args[0]
    ticket = start.args[0]  # type: ignore[union-attr]
    give_to_loop(loop, held, ticket)  # type: ignore[arg-type]
    readers, value = list(inside.users), inside.meta["val"]
    inside.meta["val"] = ticket.meta["val"]  # type: ignore[union-attr]
    last = [x for x in body.nodes if x.op == "placeholder"][-1]
    with body.inserting_after(last):
        fetch = body.call_function(start.target, (inside, *start.args[1:]))  # type: ignore[union-attr,arg-type]
    with body.inserting_after(fetch):
        wait = body.call_function(held.target, (fetch,))  # type: ignore[arg-type]
    fetch.meta["val"] = wait.meta["val"] = value
    for reader in readers:
        reader.replace_input_with(inside, wait)


def _is_update(node: Node) -> bool:
    """Whether a node is an update rule, or decodes what one updates."""
    return _is_rule(node) or (node.target in DECODES and any(map(_is_rule, node.users)))


def _is_rule(node: Node) -> bool:
    return node.target not in SPILLS and in_place_of(node.target) is not None
