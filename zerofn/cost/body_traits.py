"""What a body needs and does: what a schedule has to know of it."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

from torch.fx import GraphModule, Node

from ..comm.mesh import Mesh
from ..graph.alias import is_written
from ..graph.liveness import complete_values, moments
from ..graph.nested import call_of
from ..graph.record import recorded
from .op_cost import Traffic, flops, traffic


class BodyTraits(NamedTuple):
    """`reads`, `writes`: inputs, by their places. `sends`: what it moves -> how often. `flops`: of products. `peak`:
    the most bytes beside what it is given.
    """

    reads: list[int]
    writes: list[int]
    sends: Counter[Traffic]
    flops: int
    peak: int


def body_traits(gm: GraphModule, mesh: Mesh | None = None) -> BodyTraits:
    """Return the traits of a graph that runs once. `mesh`: whose axes `sends` names.

    They are computed once, and again if the graph has changed.
    """
    inputs = [x for x in gm.graph.nodes if x.op == "placeholder"]
    return BodyTraits(
        [k for k, x in enumerate(inputs) if x.users],
        [k for k, x in enumerate(inputs) if is_written(x)],
        traffic(gm, mesh),
        _flops(gm),
        _peak(gm),
    )


@recorded
def _flops(gm: GraphModule) -> int:
    complete_values(gm.graph)
    return sum(_flops_of(node) for node in gm.graph.nodes if node.op == "call_function")


def _flops_of(node: Node) -> int:
    call = call_of(node)
    return flops(node) if call is None else call.rounds * _flops(call.body)


@recorded
def _peak(gm: GraphModule) -> int:
    return max(x.nbytes for x in moments(gm, {}))
