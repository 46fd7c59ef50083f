"""Which part of a step an operation belongs to: noted on the nodes of a captured graph."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator

from torch.fx import Graph, Node

from .._torch_compat import current_trace

FORWARD, BACKWARD = "forward", "backward"
_KEY = "phase"


@contextlib.contextmanager
def phase(name: str) -> Iterator[None]:
    """Inside, what is captured belongs to `name`, but for what an inner phase takes."""
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
    """The phase of a node; empty where it has none."""
    return node.meta.get(_KEY, "")  # type: ignore[attr-defined]


def continue_phases(graph: Graph, known: Collection[Node]) -> None:
    """Let each node that is not among `known`, and has no phase, belong to that of the node before it."""
    before = ""
    for node in graph.nodes:
        if before and node not in known and node.op == "call_function":
            node.meta.setdefault(_KEY, before)
        if node.op == "call_function":
            before = phase_of(node)
