"""Recompute activations in the backward pass instead of saving them."""

from __future__ import annotations

from torch.fx import Graph, GraphModule, Node

from ..graph.alias import positions
from ..graph.edit import clean
from ..graph.liveness import AGAIN
from ..graph.phase import BACKWARD, FORWARD, phase_of
from ..graph.segments import Segments, is_not_kept
from ._context import Context


def recompute_activations(gm: GraphModule, context: Context) -> None:
    """Copy the forward operations of the chosen activations to their first use in the backward pass.

    The copies start from saved values, and the activations leave memory in between. Random operations depend on their
    key alone and draw the same numbers again. The memory search makes the choice. `functionalize` has made values pure
    where it could; only those can be chosen. What the step gathers and does not keep is always gathered again.
    """
    dropped = context.choice.dropped
    if not dropped and not any(map(is_not_kept, gm.graph.nodes)):
        return
    segments = Segments(gm.graph)
    chosen = {node for node in segments.activations if node.name in dropped}
    again = _Again(gm.graph, segments, chosen | segments.gathered_again)
    for node in list(gm.graph.nodes):
        if phase_of(node) == BACKWARD:
            again.feed(node)
    clean(gm)


class _Again:
    """Copies of forward operations, each inserted before its first user in the backward pass."""

    def __init__(self, graph: Graph, segments: Segments, dropped: set[Node]) -> None:
        self._graph, self._segments, self._dropped = graph, segments, dropped
        self._copies: dict[Node, Node] = {}
        self._where = positions(graph)

    def feed(self, node: Node) -> None:
        """Replace dropped inputs of a backward node by copies."""
        for x in node.all_input_nodes:
            if phase_of(x) == FORWARD and self._segments.memory(x) in self._dropped:
                node.replace_input_with(x, self._copy(x, node))

    def _copy(self, value: Node, before: Node) -> Node:
        missing = self._segments.missing(value, self._dropped, self._copies)
        for x in sorted(missing, key=self._where.__getitem__):
            with self._graph.inserting_before(before):
                made = self._graph.node_copy(x, lambda y: self._copies.get(y, y))
            made.meta.update({AGAIN: True, "phase": BACKWARD})
            self._copies[x] = made
        return self._copies[value]
