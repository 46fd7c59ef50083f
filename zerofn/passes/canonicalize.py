"""Remove nodes that change no value: detaches, views without effect, transfers of nothing, repeats, dead nodes."""

from __future__ import annotations

from typing import cast

import torch
from torch.fx import GraphModule, Node

from ..graph.edit import clean, merge_equal, weight_chain
from ..graph.node_kinds import argument, is_gather, is_scatter
from ..graph.program import alike, tensor_of
from ..ops.ravel import MARKS
from ..ops.registry import RESHAPES, SAME
from ._context import Context

aten, ops = torch.ops.aten, torch.ops.zerofn


def canonicalize(gm: GraphModule, context: Context) -> None:
    """Remove detaches, views without effect and transfers of units of which this rank has nothing, and merge repeated
    gathers of one parameter with their casts and views.

    Later passes then find each parameter gathered once. Repeated computation stays: a model may recompute on purpose.
    """
    for node in list(gm.graph.nodes):
        same = _same_value(node)
        if same is not None:
            node.replace_all_uses_with(same)
            gm.graph.erase_node(node)
    merge_equal(weight_chain(gm.graph))
    clean(gm)


def _same_value(node: Node) -> Node | None:
    """Return an earlier node with the value of `node`, judged by shape and target alone."""
    if node.op != "call_function" or not node.all_input_nodes or node.args[:1] != (node.all_input_nodes[0],):
        return None
    source = node.all_input_nodes[0]
    if node.target in (*SAME, *MARKS):
        return source
    if is_gather(node) or is_scatter(node) or node.target is ops.wait.default:
        value = tensor_of(node)
        return source if value is not None and not value.numel() and alike(value, tensor_of(source)) else None
    if node.target in RESHAPES:
        return source if alike(tensor_of(node), tensor_of(source)) else None
    if node.target is aten.t.default and source.target is aten.t.default:
        return cast(Node, argument(source, "self"))
    if node.target is aten.transpose.int and source.target is aten.transpose.int:
        dims = max(1, tensor_of(node).dim())  # type: ignore[union-attr]  # dims 0 and -1 of a scalar are one
        ours, theirs = ({argument(x, d) % dims for d in ("dim0", "dim1")} for x in (node, source))
        return cast(Node, argument(source, "self")) if ours == theirs else None
    return None
