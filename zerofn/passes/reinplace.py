"""Let elementwise operations overwrite an operand that no later node reads."""

from __future__ import annotations

from torch.fx import GraphModule, Node

from .._torch_compat import OpOverload
from ..graph.alias import last_uses, positions, roots
from ..graph.edit import clean
from ..graph.program import alike, tensor_of
from ..ops.registry import OUT_ELEMENTWISE
from ._context import Context

SMALLEST = 1 << 12  # elements; below, new memory is in the cache anyway


def reinplace(gm: GraphModule, context: Context) -> None:
    """Let an elementwise operation write into an operand that no later node reads.

    That takes less memory, and the memory is already in the cache. The values are the same, bit for bit. The pass runs
    after those that move nodes of the forward and backward pass: a move could put a reader behind the write.
    """
    where, root = positions(gm.graph), roots(gm.graph)
    last = last_uses(gm.graph, where, root)
    moved: dict[Node, Node] = {}  # a node that made memory -> the memory that it uses now

    def memory(node: Node) -> Node:
        return moved.get(root[node], root[node])

    for node in gm.graph.nodes:
        if node.target not in OUT_ELEMENTWISE:
            continue
        for operand in node.all_input_nodes:
            there = memory(operand)
            alone = all(x is operand or memory(x) is not there for x in node.all_input_nodes)
            if alone and last[there] == where[node] and _is_fresh(there) and _fits(node, operand, there):
                last[there] = last[node]
                moved[node] = there
                node.target, name = OUT_ELEMENTWISE[node.target]
                node.kwargs = {**node.kwargs, name: operand}
                break
    clean(gm)


def _is_fresh(memory: Node) -> bool:
    """Return whether the step made this memory, by an operation whose aliasing is known."""
    return isinstance(memory.target, OpOverload) and memory.target.namespace == "aten"


def _fits(node: Node, operand: Node, memory: Node) -> bool:
    """Return whether the operand fills its memory, with the result's shape and strides."""
    value, given, whole = tensor_of(node), tensor_of(operand), tensor_of(memory)
    if value is None or given is None or whole is None or value.numel() < SMALLEST:
        return False
    return alike(value, given) and (whole.numel(), whole.dtype) == (value.numel(), value.dtype)
