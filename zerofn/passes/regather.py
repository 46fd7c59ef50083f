"""Stage 3: a gathered unit is dropped between uses and gathered again."""

from __future__ import annotations

from bisect import bisect_right

from torch.fx import Graph, GraphModule, Node

from ..graph.alias import positions
from ..graph.edit import clean, is_source, sink, wait_of, weight_chain

ALIVE = 3  # gathered units at a time: one in use, and two that are kept, or under way


def regather(gm: GraphModule) -> GraphModule:
    """Cut the uses of every gathered unit where `ALIVE` or more other units are used in between, so that it and those
    could not all be alive, and give each region after the first a gather of its own. Forward and backward of a layer
    are two regions; those of the last layers are one.
    """
    graph = gm.graph
    chain = weight_chain(graph)
    inside, where = set(chain), positions(graph)
    gathers = [n for n in chain if is_source(n)]
    uses = {g: sorted(_uses(wait_of(g), inside), key=where.__getitem__) for g in gathers}
    timeline = sorted((where[u], k) for k, g in enumerate(gathers) for u in uses[g])
    for k, gather in enumerate(gathers):
        for region in _regions(uses[gather], k, timeline, where)[1:]:
            _refetch(graph, region, inside)
    sink(graph, weight_chain(graph))
    return clean(gm)


def _uses(wait: Node, inside: set[Node]) -> set[Node]:
    """The nodes outside the chain that read what `wait` yields, through any view."""
    out: set[Node] = set()
    todo = [wait]
    while todo:
        for user in todo.pop().users:
            if user in inside:
                todo.append(user)
            else:
                out.add(user)
    return out


def _regions(uses: list[Node], own: int, timeline: list[tuple[int, int]], where: dict[Node, int]) -> list[list[Node]]:
    regions = [uses[:1]]
    for before, after in zip(uses, uses[1:], strict=False):
        if _num_others(own, timeline, where[before], where[after]) >= ALIVE:
            regions.append([])
        regions[-1].append(after)
    return regions


def _num_others(own: int, timeline: list[tuple[int, int]], start: int, stop: int) -> int:
    """How many other units are used in (start, stop), counted up to ALIVE."""
    seen: set[int] = set()
    for at in range(bisect_right(timeline, (start, len(timeline) + own)), len(timeline)):
        position, unit = timeline[at]
        if position >= stop or len(seen) >= ALIVE:
            break
        if unit != own and position > start:
            seen.add(unit)
    return len(seen)


def _refetch(graph: Graph, region: list[Node], inside: set[Node]) -> None:
    """Give the users in `region` a copy of the chain they read from."""
    copies: dict[Node, Node] = {}

    def copy(node: Node) -> Node:
        if node not in inside:
            return node
        if node not in copies:
            made = graph.node_copy(node, copy)
            copies[node] = made
        return copies[node]

    for user in region:
        with graph.inserting_before(user):
            for source in list(user.all_input_nodes):
                if source in inside:
                    user.replace_input_with(source, copy(source))
