"""Gathers start ahead of their use, as far as memory allows."""

from __future__ import annotations

from heapq import heappush, heappushpop

from torch.fx import GraphModule, Node

from ..graph.alias import last_uses, positions, roots, written_before
from ..graph.edit import CASTS, clean, is_source, wait_of
from .choice import choice_of
from .regather import ALIVE


def prefetch(gm: GraphModule) -> GraphModule:
    """Start every gather, or read from a drive, with the cast of its piece, as soon as it makes no more than `ALIVE`
    units that are there and not yet used for the last time (where it was chosen how many go ahead, no more than those);
    not before its piece is there, nor before the one ahead of
    it starts. Moves are local, so the order of transfers is the same on every rank.
    """
    nodes = list(gm.graph.nodes)
    where, root = positions(gm.graph), roots(gm.graph)
    last, writer = last_uses(gm.graph, where, root), written_before(gm.graph, where, root)
    gathers, ahead = [n for n in nodes if is_source(n)], choice_of(gm).ahead
    ends: list[int] = []  # a heap: the latest last uses of the gathers so far; the first of `ALIVE` leaves the others
    for k, start in enumerate(gathers):
        moved = _with_cast(start)
        needed = [x for node in moved for x in (*node.all_input_nodes, writer.get(node)) if x and x not in moved]
        earliest = max(map(where.__getitem__, needed))
        if ahead is not None:
            if k >= ahead:
                earliest = max(earliest, where[wait_of(gathers[k - ahead])])
        elif len(ends) == ALIVE:
            earliest = max(earliest, ends[0])
        if k == 0 or earliest >= where[moved[0]]:
            at = where[start]  # it stays
        else:
            target = gathers[k - 1] if earliest <= at else nodes[earliest]
            at = max(at, earliest)
            for node in reversed(moved):
                target.append(node)
        end = last[root[wait_of(start)]]
        heappush(ends, end) if len(ends) < ALIVE else heappushpop(ends, end)
    return clean(gm)


def _with_cast(start: Node) -> list[Node]:
    piece = start.all_input_nodes[0]
    return [piece, start] if piece.target in CASTS and len(piece.users) == 1 else [start]
