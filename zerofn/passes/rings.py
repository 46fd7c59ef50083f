"""Gathered units and gradients that wait to be sent lie in memory that is made once.

An allocator that is asked for a unit and for an activation in turn ends with holes that fit neither; what a step needs
is then there, and cannot be had. Here short-lived buffers have their places, as registers have, and only activations
are asked for.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import cast

import numpy as np
import numpy.typing as npt
import torch
from torch.fx import Graph, GraphModule, Node

from ..arenas import Ring, arena_for
from ..graph.alias import positions, roots, touches
from ..graph.edit import SCATTERS, clean, is_gather, is_scatter, loops
from ..graph.liveness import memory_bytes, moments
from ..graph.program import Program, tensor_of
from ..graph.resident import resident
from .pack import Span, pack

ops = torch.ops.zerofn
MORE = 1 / 16  # of a peak: what holes cost, at least
ALIGNED = 512  # bytes: where allocators of devices begin a tensor, too
_BUCKETS = (ops.flat.default, ops.ravel.default)


def rings(gm: GraphModule, program: Program) -> GraphModule:
    """Give gathered units, and the buffers in which gradients are sent, places in one arena for each graph: all of
    them, but for the largest, or for gradients, where a step's peak would be higher by more than `MORE` with their
    places kept free all the time.
    """
    graphs = [gm, *(body for _, body in loops(gm))]
    found = [list(_spans(each.graph)) for each in graphs]
    sizes = sorted({span.nbytes for spans in found for span in spans}, reverse=True)
    if not sizes:
        return gm
    weights = _Weights(program, graphs)
    for kinds, most in itertools.product((_all, _gathered), sizes):
        kept = [[x for x in spans if x.nbytes <= most and kinds(x)] for spans in found]
        packed = [pack(spans) for spans in kept]
        if weights.peak(kept, sum(nbytes for _, nbytes in packed)) <= (1 + MORE) * weights.most:
            break
    else:
        return gm
    for each, spans, (places, nbytes) in zip(graphs, kept, packed, strict=True):
        if spans:
            device = tensor_of(spans[0].node).device  # type: ignore[union-attr]
            arena = arena_for(len(program.rings), nbytes, device)
            program.rings.append(Ring(arena, nbytes))
            for span, place in zip(spans, places, strict=True):
                _put(each.graph, span.node, [arena.number, place])
            clean(each)
    return gm


def _all(span: Span) -> bool:
    return True


def _gathered(span: Span) -> bool:
    return is_gather(span.node)


class _Weights:
    """Bytes on the device while each node of a step runs. `most`: the peak."""

    def __init__(self, program: Program, graphs: list[GraphModule]) -> None:
        own = {node: k for k, each in enumerate(graphs) for node in each.graph.nodes}
        around = {node: loop for loop, body in loops(graphs[0]) for node in body.graph.nodes}
        self._where = [positions(each.graph) for each in graphs]
        nodes, total = [], []
        for node, live in moments(program.gm, resident(program).device):
            nodes.append(node)
            total.append(sum(live.values()))
        self._total = np.array(total)
        self.most = max(total)
        # Of each moment: its graph, and its positions there and in the step.
        self._inside = np.array([own[n] for n in nodes])
        self._at = np.array([self._where[own[n]][n] for n in nodes])
        self._outside = np.array([self._where[0][around.get(n, n)] for n in nodes])

    def peak(self, spans: list[list[Span]], nbytes: int) -> int:
        """The peak where these have places in `nbytes` that are there all the time."""
        alive = [self._alive(found, len(where)) for found, where in zip(spans, self._where, strict=True)]
        freed = alive[0][self._outside]
        for k, own in enumerate(alive[1:], 1):
            freed[self._inside == k] += own[self._at[self._inside == k]]
        return int((self._total - freed).max()) + nbytes

    @staticmethod
    def _alive(spans: list[Span], size: int) -> npt.NDArray[np.int64]:
        change = np.zeros(size + 1, dtype=np.int64)
        for span in spans:
            change[span.start] += memory_bytes(span.node.meta["val"])
            change[span.stop + 1] -= memory_bytes(span.node.meta["val"])
        return np.cumsum(change)[:size]


def _spans(graph: Graph) -> Iterator[Span]:
    """What may lie in a ring: gathered units, and flat gradients that are sent, which do not leave the graph."""
    where, root = positions(graph), roots(graph)
    touched = touches(graph, root)
    leaves = {root[x] for x in next(iter(reversed(graph.nodes))).all_input_nodes}
    sent = {root[n.all_input_nodes[0]] for n in graph.nodes if is_scatter(n)}
    for node, at in where.items():
        is_bucket = node.target in _BUCKETS and node in sent and len(node.args) != 5
        if (is_bucket or _is_unit(node, root)) and node not in leaves:
            nbytes = -(-memory_bytes(node.meta["val"]) // ALIGNED) * ALIGNED
            yield Span(node, at, where[touched[node][-1]], nbytes)


def _is_unit(node: Node, root: dict[Node, Node]) -> bool:
    """Whether a node gathers parameters: at stage 0 gradients are gathered, too, and wait for the update."""
    return is_gather(node) and root[node.all_input_nodes[0]].target not in SCATTERS


def _put(graph: Graph, node: Node, place: list[int]) -> None:
    """Let a node make its memory at a place."""
    if is_gather(node):
        node.kwargs = {**node.kwargs, "place": place}
        return
    value = tensor_of(node)
    assert value is not None
    with graph.inserting_before(node):
        bucket = graph.call_function(ops.bucket.default, (value.numel(), value.dtype, value.device, place))
        bucket.meta.update(node.meta)
        if node.target is ops.ravel.default:
            leaves, offsets = cast(tuple[list[Node | None], list[int]], node.args[:2])
            numels = [0 if x is None else tensor_of(x).numel() for x in leaves]  # type: ignore[union-attr]
            graph.call_function(ops.fill_.default, (bucket, leaves, offsets, numels, [False] * len(leaves)))
    node.replace_all_uses_with(bucket)
    graph.erase_node(node)
