"""Compute, while values of layers are under way between ranks, what does not wait for them."""

from __future__ import annotations

from collections.abc import Sequence

from torch.fx import Node

from ..cost.op_cost import flops
from ..graph.alias import writes
from ..graph.edit import clean
from ..graph.node_kinds import arguments, is_start, start_of, wait_of
from ..graph.program import Program


def hide_sums(program: Program) -> None:
    """Move products that a transfer of values does not need from before its start to before its wait.

    Layers that are cut over ranks sum, exchange or gather values, and what follows needs them at once. In the backward
    pass the product before a transfer is that of the gradient which is sent; those of weights, which it does not need,
    come in between. A reduce-scatter and the all-gather that makes a sum of it get half of them each.
    """
    window: list[Node] = []  # since the last transfer
    nodes = [node for node in program.gm.graph.nodes if node.op == "call_function"]
    for k, node in enumerate(nodes):
        if not _is_of_values(node):
            window.append(node)
            continue
        wait, then = nodes[k + 1 : k + 2], nodes[k + 2 : k + 3]
        makes_sum = wait == [wait_of(node)] and then and _is_of_values(then[0]) and then[0] in wait[0].users
        _place(_not_needed(node, window), node, then[0] if makes_sum else None)
        window = []
    clean(program.gm)


def _is_of_values(node: Node) -> bool:
    """Return whether a node starts a transfer of values, not of a unit."""
    return is_start(node) and not arguments(node).get("unit")


def _not_needed(start: Node, window: Sequence[Node]) -> list[Node]:
    """Return what neither a transfer nor anything that has to stay needs of the nodes before its start, in order."""
    if any(writes(x) for x in window):
        return []  # what is moved might read what they write
    needed = {start}
    for node in reversed(window):
        if is_start(node) or start_of(node) is not None or any(x in needed for x in node.users):
            needed.add(node)
    return [x for x in window if x not in needed]


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
