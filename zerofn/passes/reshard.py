"""Stage 3: drop a gathered unit between uses, and gather it again."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable

from torch.fx import Graph, GraphModule, Node

from ..graph.alias import positions
from ..graph.edit import clean, sink, weight_chain
from ..graph.nested import PIECE
from ..graph.node_kinds import is_source, wait_of
from ._context import Context

ALIVE = 3  # gathered units at a time: one in use, and two in memory or in flight


def reshard(gm: GraphModule, context: Context) -> None:
    """Gather a unit again after every gap between two uses in which `ALIVE` or more other units are used.

    The unit leaves memory during the gap. Forward and backward of a layer are then two regions of use; those of the
    last layers stay one. Cuts that the memory search has chosen replace this rule. What is gathered for several
    microbatches stays between them, because `hoist_gathers` has moved it there to stay. `recompute_activations` runs
    before, because its copies in the backward pass use units, too.
    """
    graph = gm.graph
    cuts, chain = context.choice.cuts, weight_chain(graph)
    inside, where = set(chain), positions(graph)
    uses = uses_of_gathers(graph, chain, where)
    timeline = sorted((where[u], k) for k, found in enumerate(uses.values()) for u in found)
    for k, (gather, found) in enumerate(uses.items()):

        def cut(before: Node, after: Node, k: int = k, gather: Node = gather) -> bool:
            if cuts is not None:
                return (gather.name, before.name) in cuts
            if before.meta.get(PIECE, before) == after.meta.get(PIECE):
                return False
            return num_others(k, timeline, where[before], where[after]) >= ALIVE

        for region in _regions(found, cut)[1:]:
            _refetch(graph, region, _views(wait_of(gather), inside), inside)
    sink(graph, weight_chain(graph))
    clean(gm)


def uses_of_gathers(graph: Graph, chain: list[Node], where: dict[Node, int]) -> dict[Node, list[Node]]:
    """Map the source of each gathered unit to the nodes that compute with it, in order."""
    inside = set(chain)
    return {n: sorted(_uses(wait_of(n), inside), key=where.__getitem__) for n in chain if is_source(n)}


def _uses(wait: Node, inside: set[Node]) -> set[Node]:
    """Return the nodes outside the chain that read what `wait` yields, through any view."""
    return {user for view in _views(wait, inside) for user in view.users if user not in inside}


def _views(wait: Node, inside: set[Node]) -> set[Node]:
    """Return `wait`, and the nodes of the chain that read what it yields."""
    found, todo = {wait}, [wait]
    while todo:
        more = [user for user in todo.pop().users if user in inside and user not in found]
        found |= set(more)
        todo += more
    return found


def _regions(uses: list[Node], cut: Callable[[Node, Node], bool]) -> list[list[Node]]:
    regions = [uses[:1]]
    for before, after in zip(uses, uses[1:], strict=False):
        if cut(before, after):
            regions.append([])
        regions[-1].append(after)
    return regions


def num_others(own: int, timeline: list[tuple[int, int]], start: int, stop: int) -> int:
    """Return how many other units are used in (start, stop), counted up to ALIVE. `timeline`: (position, unit) of all
    uses.
    """
    seen: set[int] = set()
    for at in range(bisect_right(timeline, (start, len(timeline) + own)), len(timeline)):
        position, unit = timeline[at]
        if position >= stop or len(seen) >= ALIVE:
            break
        if unit != own and position > start:
            seen.add(unit)
    return len(seen)


def _refetch(graph: Graph, region: list[Node], views: set[Node], inside: set[Node]) -> None:
    """Give the users in `region` a gather of their own: a copy of those of `views` that they read, and of the nodes of
    the chain before them. A user may read other units, too.
    """
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
                if source in views:
                    user.replace_input_with(source, copy(source))
