"""Phases: the part of a step that an operation belongs to, recorded on the nodes of a captured graph."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator

from torch.fx import Graph, Node

from .._torch_compat import current_trace

FORWARD, BACKWARD = "forward", "backward"
_KEY = "phase"


@contextlib.contextmanager
def phase(name: str) -> Iterator[None]:
    """Give the nodes that are captured inside the phase `name`, unless an inner `phase` gives them another."""
    trace = current_trace()
    if trace is None:
        yield
        return
    graph = trace.tracer.graph
    before = next(iter(reversed(graph.nodes)), None)
    yield
    for node in reversed(graph.nodes):
        if node is before:
            break
        node.meta.setdefault(_KEY, name)


def phase_of(node: object) -> str:
    """Return a node's phase, or "" if it has none."""
    return node.meta.get(_KEY, "")  # type: ignore[attr-defined]


def continue_phases(graph: Graph, known: Collection[Node]) -> None:
    """Give each operation without a phase, and not among `known`, the phase of the operation before it."""
    before = ""
    for node in graph.nodes:
        if before and node not in known and node.op == "call_function":
            node.meta.setdefault(_KEY, before)
        if node.op == "call_function":
            before = phase_of(node)
