"""Give gathered units, and the buckets that gradients are sent from, places in memory that is allocated once.

An allocator that serves units and activations in turn leaves holes that fit neither: their memory is free but unusable.
So short-lived buffers share static memory, and only activations come from the allocator.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import torch
from torch.fx import Graph, GraphModule, Node

from ..graph.alias import positions, roots, touches
from ..graph.buffers import add_buffer
from ..graph.edit import clean, made_by
from ..graph.liveness import memory_bytes, moments
from ..graph.nested import call_of, graphs_of
from ..graph.node_kinds import gathers_parameters, is_batched, is_gather, is_scatter, makes_bucket
from ..graph.program import Program, tensor_of
from ..graph.resident import resident
from ._packing import Lifetime, pack

ops = torch.ops.zerofn
MORE = 1 / 16  # of a peak: fragmentation costs at least this much
ALIGNED = 512  # bytes: where allocators of devices begin a tensor, too


def assign_buffers(program: Program) -> None:
    """Assign each graph's gathered units and reduce-scatter buckets to one static buffer.

    Static memory is reserved for the whole step. If it would raise the peak by more than `MORE`, or above the budget,
    the largest values stay with the allocator, then also all buckets. The pass runs last: places depend on when values
    are needed, so no node may move afterwards.
    """
    gm = program.gm
    graphs = graphs_of(gm)
    found = [list(_spans(each.graph)) for each in graphs]
    sizes = sorted({span.nbytes for spans in found for span in spans}, reverse=True)
    if not sizes:
        return
    weights = _Weights(program, graphs)
    limit = min((1 + MORE) * weights.most, math.inf if program.budget is None else program.budget)
    for kinds, most in itertools.product((_all, _gathered), sizes):
        kept = [[x for x in spans if x.nbytes <= most and kinds(x)] for spans in found]
        packed = [pack(spans) for spans in kept]
        if weights.peak(kept, sum(nbytes for _, nbytes in packed)) <= limit:
            break
    else:
        return
    for each, spans, (places, nbytes) in zip(graphs, kept, packed, strict=True):
        if spans:
            device = tensor_of(spans[0].node).device  # type: ignore[union-attr]
            buffer = add_buffer(program.buffers, device, nbytes)
            for span, place in zip(spans, places, strict=True):
                _put(span.node, [buffer, place])
            clean(each)


def _all(span: Lifetime) -> bool:
    return True


def _gathered(span: Lifetime) -> bool:
    return is_gather(span.node)


class _Weights:
    """Bytes on the device while each node of a step runs. `most`: the peak."""

    def __init__(self, program: Program, graphs: list[GraphModule]) -> None:
        places = _places(program.gm, {each: k for k, each in enumerate(graphs)})
        self._moments: list[tuple[tuple[tuple[int, int], ...], int]] = []
        last: Node | None = None
        for node, live in moments(program.gm, resident(program).device):
            if node is not last:  # a loop has two: the last sums of its rounds, and what it returns
                last, here = next(places)
                assert last is node
            self._moments.append((here, sum(live.values())))
        self._sizes = [len(each.graph.nodes) for each in graphs]
        self.most = max(nbytes for _, nbytes in self._moments)

    def peak(self, spans: list[list[Lifetime]], nbytes: int) -> int:
        """Return the peak if these values have places in `nbytes` of static memory."""
        alive = [_alive(found, size) for found, size in zip(spans, self._sizes, strict=True)]
        return nbytes + max(there - sum(alive[k][at] for k, at in places) for places, there in self._moments)


def _places(
    gm: GraphModule, number: dict[GraphModule, int], outside: tuple[tuple[int, int], ...] = ()
) -> Iterator[tuple[Node, tuple[tuple[int, int], ...]]]:
    """Yield every node, as often as moments have it and in their order, with (number of its graph, position there) and
    the places of the nodes that run it.
    """
    for at, node in enumerate(gm.graph.nodes):
        here = (*outside, (number[gm], at)) if gm in number else outside
        if call := call_of(node):
            yield from _places(call.body, number, here)
        yield node, here


def _alive(spans: list[Lifetime], size: int) -> list[int]:
    """Return the bytes of these values at each position of a graph."""
    change = [0] * (size + 1)
    for span in spans:
        change[span.start] += memory_bytes(span.node.meta["val"])
        change[span.stop + 1] -= memory_bytes(span.node.meta["val"])
    return list(itertools.accumulate(change))


def _spans(graph: Graph) -> Iterator[Lifetime]:
    """Yield what may be in a static buffer: gathered units and gradient buckets that do not leave the graph."""
    where, root = positions(graph), roots(graph)
    touched = touches(graph, root)
    leaves = {root[x] for x in next(iter(reversed(graph.nodes))).all_input_nodes}
    sent = {root[n.all_input_nodes[0]] for n in graph.nodes if is_scatter(n)}
    for node, at in where.items():
        is_bucket = makes_bucket(node) and node in sent and not is_batched(node)
        if (is_bucket or gathers_parameters(node, root)) and node not in leaves:
            nbytes = -(-memory_bytes(node.meta["val"]) // ALIGNED) * ALIGNED
            yield Lifetime(node, at, where[touched[node][-1]], nbytes)


def _put(node: Node, place: list[int]) -> None:
    """Set the place of a node's result."""
    if is_gather(node):
        node.kwargs = {**node.kwargs, "place": place}
    else:
        value = node.meta["val"]
        made_by(node, ops.bucket.default, value.numel(), value.dtype, value.device, place)
