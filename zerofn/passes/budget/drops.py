"""The values of a graph that may leave memory, and what each way to bring one back costs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import cast

from torch.fx import Graph, GraphModule, Node

from ...cost.op_cost import UP, Traffic, moved
from ...cost.simulator import Lanes
from ...dry_run.fake_machine import is_host
from ...graph.alias import positions
from ...graph.edit import weight_chain
from ...graph.liveness import memory_bytes
from ...graph.phase import FORWARD, phase_of
from ...graph.program import tensor_of
from ...graph.segments import Segments
from ..offload_activations import stays
from ..reshard import num_others, uses_of_gathers
from .eviction import Drop, cheapest

# The share of the forward pass that is assumed to hide transfers. It is less than 1, because transfers come in bursts
# and devices may be faster than simulated. On a simulated H100, GPT-2 of 6 layers of 2,048 in half of its memory took
# 172.6 ms with 1, 163.6 with 0.25, and 163.7 without transfers.
HIDDEN = 0.25
AGAIN, GATHERED, OFFLOADED = "recomputed", "gathered again", "copied back"  # how a dropped value comes back


def activations(lanes: Lanes, segments: Segments, where: dict[Node, int]) -> Iterator[Drop]:
    """Yield the activations that may be recomputed, at positions of the scheduled graph."""
    for memory in segments.activations:
        last, first = segments.gap(memory)
        seconds = sum(map(lanes.cost, segments.missing(memory, {memory})))
        nbytes = memory_bytes(memory.meta["val"])
        if nbytes:  # batch norm in eval mode saves two empty tensors
            yield Drop((AGAIN, memory.name), where[last], where[first], nbytes, seconds, memory.name)


def drops_of(gm: GraphModule, lanes: Lanes, where: dict[Node, int]) -> Iterator[Drop]:
    """Yield every value that may be dropped, once for each way to bring it back."""
    segments = Segments(gm.graph)
    again = list(activations(lanes, segments, where))
    yield from again
    yield from _offloads(gm, lanes, where, again, segments.gathered_again)
    yield from _gathers(gm, lanes, where)


def _offloads(
    gm: GraphModule, lanes: Lanes, where: dict[Node, int], computed: list[Drop], gone: set[Node]
) -> Iterator[Drop]:
    """Yield activations that may wait in host memory, at positions of the scheduled graph; none where models compute
    on the host, and nothing that is `gone` anyway.

    Transfers that fit into the share `HIDDEN` of the forward pass cost only the time that device memory takes to read
    or write. The activations that are the most expensive to recompute get that share. All other transfers are assumed
    to stall the device, in both directions.
    """
    found = [x for x in stays(gm.graph) if x.memory not in gone and not is_host(tensor_of(x.memory).device)]  # type: ignore[union-attr]
    again = {drop.of: drop.seconds / drop.nbytes for drop in computed}
    free = HIDDEN * sum(lanes.cost(n) for n in gm.graph.nodes if phase_of(n) == FORWARD) if found else 0.0
    for x in sorted(found, key=lambda x: -again.get(x.memory.name, 0.0)):
        nbytes = memory_bytes(x.memory.meta["val"])
        seconds = lanes.seconds_of(UP, nbytes)
        free -= seconds
        cost = nbytes / lanes.machine.memory_rate if free > 0 else seconds
        yield Drop((OFFLOADED, x.memory.name), where[x.last], where[x.first], nbytes, 2 * cost, x.memory.name)


def least_of(level: list[int], drops: list[Drop]) -> list[Drop]:
    """Return the drops that give the lowest peak."""
    _, left = cheapest(level, drops, 0)
    return cheapest(level, drops, left)[0]


def all_of(drops: list[Drop], how: str) -> list[Drop]:
    """Return one drop of every value; if a value has several, prefer the one that brings it back in this way."""
    first = {drop.of or drop.key: drop for drop in sorted(drops, key=lambda x: x.key[0] == how)}  # type: ignore[index]
    return [drop for drop in drops if first[drop.of or drop.key] is drop]


def _gathers(gm: GraphModule, lanes: Lanes, where: dict[Node, int]) -> Iterator[Drop]:
    """Yield units that may be gathered again, between two uses that have uses of another unit in between."""
    uses = uses_of_gathers(gm.graph, weight_chain(gm.graph), positions(gm.graph))
    timeline = sorted((where[u], k) for k, found in enumerate(uses.values()) for u in found)
    for k, (start, found) in enumerate(uses.items()):
        for before, after in zip(found, found[1:], strict=False):
            if num_others(k, timeline, where[before], where[after]):
                nbytes = tensor_of(start).nbytes  # type: ignore[union-attr]
                key = (start.name, before.name)
                _, seconds = lanes.transfer(start, cast(Traffic, moved(start)))
                yield Drop((GATHERED, key), where[before], where[after], nbytes, seconds)


def positions_in(graph: Graph, final: Graph) -> dict[Node, int]:
    """Map each node of a graph to its position in the scheduled graph; a node that was replaced takes the position of
    the one before it.
    """
    there = {node.name: k for k, node in enumerate(final.nodes)}
    out: dict[Node, int] = {}
    at = 0
    for node in graph.nodes:
        at = out[node] = there.get(node.name, at)
    return out
