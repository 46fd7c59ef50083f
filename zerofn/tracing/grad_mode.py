"""Whether an operation runs in grad mode.

Some kernels still ask for that below autograd: oneDNN's LSTM rounds otherwise without it, and keeps nothing for its
backward pass. So each node of a captured step knows the mode in which the step called its operation, and runs in it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.fx import Node

from .._torch_compat import OpOverload, current_trace

_KEY = "grad_mode"


def with_grad_mode(node: Node) -> Node:
    """Return a new node, with its mode written down."""
    if torch.is_grad_enabled():
        node.meta[_KEY] = True
    return node


@contextmanager
def noted_grad_mode() -> Iterator[None]:
    """Write down the mode of the nodes that a trace adds inside."""
    trace = current_trace() if torch.is_grad_enabled() else None
    if trace is None:
        yield
        return
    nodes = trace.tracer.graph.nodes
    before = next(iter(reversed(nodes)), None)
    yield
    for node in reversed(nodes):
        if node is before:
            break
        node.meta[_KEY] = True


def grad_mode(node: Node) -> bool | None:
    """Return the mode in which a node runs; None if it is the same to it."""
    if not isinstance(node.target, OpOverload) or node.target.namespace == "zerofn":
        return None
    return bool(node.meta.get(_KEY))
