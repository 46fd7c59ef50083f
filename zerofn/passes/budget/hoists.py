"""Which units of a loop's body to gather once, before the loop: as many as memory allows."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch.fx import GraphModule, Node

from ...graph.liveness import blocks, memory_bytes
from ...graph.nested import calls, graphs_of
from ...graph.node_kinds import argument, is_gather
from ..hoist_gathers import hoistable


def of_bodies(gm: GraphModule) -> dict[GraphModule, list[Node]]:
    """Return, for each body that runs more than once, the gathers that may move out of it, smaller units first."""
    found: dict[GraphModule, list[Node]] = {}
    for each in graphs_of(gm):
        for _, call in calls(each):
            if call.rounds > 1:
                found[call.body] = sorted(hoistable(call), key=_nbytes)
    return found


def fitting(gm: GraphModule, level: Sequence[int], gathers: Sequence[Node], limit: int) -> list[str]:
    """Return the names of those of `gathers` whose units may stay in memory all the time within `limit`, the first ones
    preferred. `gm`: the scheduled body, in which a unit may be gathered several times; `level`: bytes at its nodes.
    """
    alive = {x: np.zeros(len(level), dtype=bool) for x in (argument(start, "unit") for start in gathers)}
    for block in blocks(gm.graph):
        if is_gather(block.node) and (unit := argument(block.node, "unit")) in alive:
            alive[unit][block.born : block.dies + 1] = True
    now, chosen = np.array(level, dtype=np.int64), []
    for start in gathers:
        more = now + ~alive[argument(start, "unit")] * _nbytes(start)
        if more.max() <= limit:
            now = more
            chosen.append(start.name)
    return chosen


def _nbytes(gather: Node) -> int:
    return memory_bytes(gather.meta["val"])
