"""Compute, while values of layers are under way between ranks, what does not wait for them."""

from __future__ import annotations

import operator
from collections.abc import Sequence

from torch.fx import Graph, GraphModule, Node

from ..cost.op_cost import flops
from ..graph.alias import is_view, positions, with_writes
from ..graph.edit import clean
from ..graph.liveness import AGAIN
from ..graph.node_kinds import arguments, is_start, start_of, wait_of
from ._context import Context


def hide_sums(gm: GraphModule, context: Context) -> None:
    """Move products that a transfer of values does not need from before its start to before its wait.

    Layers that are cut over ranks sum, exchange or gather values, and what follows needs them at once. In the backward
    pass the product before a transfer is that of the gradient which is sent; those of weights, which it does not need,
    come in between. A reduce-scatter and the all-gather that makes a sum of it get half of them each.

    What the backward pass gathers again it has for long: such a gather starts as soon as the one before it is over.
    """
    _start_again_early(gm.graph)
    window: list[Node] = []  # since the last transfer
    nodes = [node for node in gm.graph.nodes if node.op == "call_function"]
    for k, node in enumerate(nodes):
        if not _is_of_values(node):
            window.append(node)
            continue
        wait, then = nodes[k + 1 : k + 2], nodes[k + 2 : k + 3]
        makes_sum = wait == [wait_of(node)] and then and _is_of_values(then[0]) and then[0] in wait[0].users
        _place(_not_needed(node, window), node, then[0] if makes_sum else None)
        window = []
    clean(gm)


def _start_again_early(graph: Graph) -> None:
    """Move gathers that run again, with the views that they send, to behind the wait of the transfer before them."""
    where, last = positions(graph), None
    for node in list(graph.nodes):
        begun = start_of(node)
        if begun is not None and _is_of_values(begun):
            last = node
        elif last is not None and node.meta.get(AGAIN) and _is_of_values(node):
            moved = [node]
            while where[source := moved[-1].all_input_nodes[0]] > where[last] and is_view(source):
                moved.append(source)
            if where[source] <= where[last]:
                for each in moved:  # the views right behind the wait, and so before what was put there already
                    last.append(each)


def _is_of_values(node: Node) -> bool:
    """Return whether a node starts a transfer of values, not of a unit."""
    return is_start(node) and not arguments(node).get("unit")


def _not_needed(start: Node, window: Sequence[Node]) -> list[Node]:
    """Return what neither a transfer nor anything that has to stay needs of the nodes before its start, in order."""
    if any(written for _, written in with_writes(window)):
        return []  # what is moved might read what they write
    needed = {start}
    for node in reversed(window):
        waits = start_of(node) is not None and not node.meta.get(AGAIN)
        if is_start(node) or waits or any(x in needed for x in node.users):
            needed.add(node)
    free = {x for x in window if x not in needed}
    # All results of an operation are in memory until the last of them has been taken.
    return [x for x in window if x in free and (x.target is not operator.getitem or x.all_input_nodes[0] in free)]


def _place(free: Sequence[Node], start: Node, then: Node | None) -> None:
    """Put nodes behind the start of a transfer, and half of their work behind that of the next."""
    work = [flops(x) for x in free]
    total = sum(work)
    if not total:
        return
    done, anchor = 0, start
    for node, n in zip(free, work, strict=True):
        if then is not None and done >= total / 2:
            anchor, then = then, None
        anchor.append(node)
        anchor, done = node, done + n
