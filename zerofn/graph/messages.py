"""The messages of a scheduled step: what this rank sends to others and receives from them, in order."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from torch import Tensor
from torch.fx import Graph, Node

from .fingerprint import MESSAGES
from .node_kinds import argument, traits
from .program import tensor_of


class End(NamedTuple):
    """This rank's end of a message. `peer`: the rank of `group` at the other end. `edge`: what is sent."""

    node: Node
    sends: bool
    peer: int
    group: str
    edge: str
    value: Tensor


def message_ends(graph: Graph) -> Iterator[End]:
    """Yield the ends of messages, in the order in which they are posted."""
    for node in graph.nodes:
        kind = traits(node).collective
        if kind in MESSAGES:
            value = tensor_of(node.all_input_nodes[0] if kind == "send" else node)
            assert value is not None
            place = argument(node, "peer"), argument(node, "group"), argument(node, "edge")
            yield End(node, kind == "send", *place, value)
