"""One capture of a microbatch for all stages of a pipeline.

Between the parameters and their gradients a microbatch is the same on all ranks, see `graph.region`. A planner, which
captures the step of every rank in one process, runs that part once: captures behind the first one copy its nodes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from types import FunctionType
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from .. import tree
from .._torch_compat import bind, bound_node, current_trace, node_of, outside_trace
from ..util.by_identity import ByIdentity
from ..util.closures import closed_over
from ..util.context import inside

T = TypeVar("T")
_PLAIN = (int, float, bool, str, bytes, type(None))


@dataclass(frozen=True)
class _Recorded:
    """A region as it was captured first, in a graph of its own, which no pass changes.

    `key`: what it depends on. `inputs`: the graph's nodes that stand for the region's inputs, by number. `outputs`: for
    each leaf of what it returns its node and value, or what it is if it is not a tensor; `treedef`: the tree of these.
    `constants`: tensors that the region reads, by their names in the graph.
    """

    key: Any
    graph: Graph
    inputs: dict[int, Node]
    outputs: list[tuple[Node | None, Any]]
    treedef: tree.PyTreeSpec
    constants: dict[str, Tensor]


class Regions(list[_Recorded]):
    """The regions that captures of one step have run, for ranks between which only the state differs, in one fake
    machine.
    """


_regions: ContextVar[Regions | None] = ContextVar("regions", default=None)


def shared(regions: Regions | None) -> contextlib.AbstractContextManager[Regions | None]:
    """Inside, captures share these regions; None: each capture runs its own."""
    return inside(_regions, regions)


def shared_region(run: Callable[[], T], function: Any, inputs: Any, rest: Any) -> T:
    """Return `run()`, a tree, or what an earlier capture of the same region has returned, with copies of its nodes.

    `run` computes with `function` on the tensors in the tree `inputs` alone, which have no gradients outside; None: it
    is not shared. `rest`: what else the results depend on, comparable by `==`.
    """
    regions, trace = _regions.get(), current_trace()
    if regions is None or trace is None or inputs is None:
        return run()
    tracer = trace.tracer
    leaves, treedef = tree.flatten(inputs)
    tensors = [x for x in leaves if isinstance(x, Tensor)]
    nodes = [node for x in tensors if (node := bound_node(tracer, x)) is not None]
    if len(nodes) < len(tensors):
        return run()
    like = [_kind_of(x) if isinstance(x, Tensor) else x for x in leaves]
    key = treedef, like, [nodes.index(x) for x in nodes], rest, _identity(function)
    for known in regions:
        if known.key == key:
            return _copied(known, tracer, nodes)
    before = set(tracer.graph.nodes)
    out = run()
    made = _record(tracer, before, nodes, out)
    if made is not None:
        regions.append(_Recorded(key, *made))
    return out


def _kind_of(x: Tensor) -> tuple[Any, ...]:
    return tuple(x.shape), x.stride(), x.dtype, x.device, x.requires_grad


def _identity(function: Any) -> Any:
    """Return what tells a function from others: of one that a step defines anew, its code and what it closes over."""
    if not isinstance(function, FunctionType):
        return ByIdentity(function)
    given = (*closed_over(function).values(), *(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())
    return function.__code__, [(type(x), x if isinstance(x, _PLAIN) else ByIdentity(x)) for x in given]


def _record(tracer: Any, before: set[Node], nodes: Sequence[Node], out: Any) -> Any:
    """Return the fields of `_Recorded` behind `key`; None for a region that reads more than its inputs."""
    graph = Graph()
    inputs = {k: graph.placeholder(f"input_{k}") for k, node in enumerate(nodes) if nodes.index(node) == k}
    known = {nodes[k]: own for k, own in inputs.items()}
    constants: dict[str, Tensor] = {}
    for node in tracer.graph.nodes:
        if node in before:
            continue
        if node.op == "get_attr":
            value = getattr(tracer.root, node.target, None)
            if not isinstance(value, Tensor):  # a loop's body, which passes change
                return None
            constants[node.target] = value
        elif node.op != "call_function" or any(x not in known for x in node.all_input_nodes):
            return None
        known[node] = graph.node_copy(node, known.__getitem__)
    leaves, treedef = tree.flatten(out)
    outputs: list[tuple[Node | None, Any]] = []
    for x in leaves:
        end = node_of(tracer, x) if isinstance(x, Tensor) else None
        if isinstance(x, Tensor) and end not in known:
            return None
        outputs.append((None if end is None else known[end], x))
    return graph, inputs, outputs, treedef, constants


def _copied(region: _Recorded, tracer: Any, nodes: Sequence[Node]) -> Any:
    """Add a region's nodes to a trace, and return its results."""
    graph = tracer.graph
    names = {name: _constant(tracer.root, name, x) for name, x in region.constants.items()}
    known = {own: nodes[k] for k, own in region.inputs.items()}
    for node in region.graph.nodes:
        if node.op != "placeholder":
            known[node] = graph.node_copy(node, known.__getitem__)
            if node.op == "get_attr":
                known[node].target = names[node.target]
    leaves = [x if end is None else _result(tracer, known[end], x) for end, x in region.outputs]
    return tree.unflatten(region.treedef, leaves)


def _constant(root: GraphModule, name: str, value: Tensor) -> str:
    """Let a module have a constant; return its name there."""
    number = 0
    while getattr(root, name, value) is not value:
        name = f"_tensor_constant{number}"
        number += 1
    setattr(root, name, value)
    return name


def _result(tracer: Any, node: Node, like: Tensor) -> Tensor:
    with outside_trace():
        x = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=like.device)
    bind(tracer, x, node)
    return x
