"""Read state on a drive once to compute with it, and once to update it."""

from __future__ import annotations

from typing import cast

from torch.fx import Graph, GraphModule, Node

from ..graph.alias import positions
from ..graph.edit import clean
from ..graph.nested import calls, give
from ..graph.node_kinds import UPDATE, decodes, fetched, in_place_of, is_fetch, lies_at, start_of, stores, wait_of
from ._context import Context


def split_state_reads(gm: GraphModule, context: Context) -> None:
    """Read state on a drive once for the computation, and again for its update.

    The shard need not stay in memory in between. A body reads its inputs in every round. Reads for updates are
    marked `UPDATE`: `donate`, `raise_updates` and `schedule_state_reads` rely on the mark.
    """
    for node, call in calls(gm):
        for inside, given in call.given.items():
            if fetched(given):
                _read_inside(node, call.body.graph, inside, given)
        clean(call.body)
    clean(gm)
    where = positions(gm.graph)
    for start in list(filter(is_fetch, gm.graph.nodes)):
        wait = wait_of(start)
        updates, moved = [x for x in wait.users if _is_update(x)], list(filter(stores, wait.users))
        if moved and len(moved) < len(wait.users):
            _read_again(start, wait, moved, where)
        if updates:
            mine = start if len(updates) == len(wait.users) else _read_again(start, wait, updates, where)
            mine.meta[UPDATE] = True
    clean(gm)


def _read_again(start: Node, wait: Node, users: list[Node], where: dict[Node, int]) -> Node:
    """Give these users a read of their own, and return its start."""
    with start.graph.inserting_before(min(users, key=where.__getitem__)):
        again = start.graph.node_copy(start)
        held = start.graph.node_copy(wait, {start: again}.__getitem__)
    for user in users:
        user.replace_input_with(wait, held)
    return again


def _read_inside(node: Node, body: Graph, inside: Node, held: Node) -> None:
    """Move a read from before a node into its body: the node passes the handle instead of the value."""
    start = cast(Node, start_of(held))
    handle = lies_at(start)
    give(node, held, handle)
    readers, value = list(inside.users), inside.meta["val"]
    inside.meta["val"] = handle.meta["val"]
    last = [x for x in body.nodes if x.op == "placeholder"][-1]
    with body.inserting_after(last):
        fetch = body.node_copy(start, {handle: inside}.__getitem__)
    with body.inserting_after(fetch):
        wait = body.node_copy(held, {start: fetch}.__getitem__)
    fetch.meta["val"] = wait.meta["val"] = value
    for reader in readers:
        reader.replace_input_with(inside, wait)


def _is_update(node: Node) -> bool:
    """Return whether a node is an update rule, or decodes a rule's input."""
    return _is_rule(node) or (decodes(node) and any(map(_is_rule, node.users)))


def _is_rule(node: Node) -> bool:
    return not stores(node) and in_place_of(node.target) is not None
