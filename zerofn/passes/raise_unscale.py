"""Unscale each gradient as soon as it is reduced."""

from __future__ import annotations

import torch
from torch.fx import GraphModule, Node

from ..graph.alias import positions
from ..graph.edit import clean, raise_up
from ..graph.node_kinds import argument, casts, is_fetch, is_scatter
from ..graph.program import tensor_of
from ._context import Context

ops = torch.ops.zerofn


def raise_unscale(gm: GraphModule, context: Context) -> None:
    """Move each product of a unit's gradient with a number up to where both are known, with what computes the number.

    The norm, and transfers to the host or a drive, can then start before the last gradient is made. A gradient that
    stays in memory keeps its narrower dtype until its update. `raise_reduce_scatters` has placed the waits after which
    the gradients are known.
    """
    goes = any(map(is_fetch, gm.graph.nodes))
    moved: dict[Node, None] = {}
    for node in gm.graph.nodes:
        if node.target is not torch.ops.aten.mul.Tensor:
            continue
        gradient = argument(node, "self")
        cast = [gradient] if isinstance(gradient, Node) and casts(gradient) and goes else []
        if _is_gradient(cast[0].all_input_nodes[0] if cast else gradient):
            moved.update(_number(argument(node, "other")))
            moved.update(dict.fromkeys([*cast, node]))
    where = positions(gm.graph)
    raise_up(gm.graph, sorted(moved, key=where.__getitem__))
    clean(gm)


def _is_gradient(x: object) -> bool:
    """Return whether `x` is a unit's complete, reduced gradient."""
    if not isinstance(x, Node):
        return False
    if x.target is ops.wait.default:
        return is_scatter(x.all_input_nodes[0])
    return x.target is ops.ravel.default and not any(map(is_scatter, x.users))


def _number(x: object) -> dict[Node, None]:
    """Return the scalar operations that make the number `x`."""
    value = tensor_of(x) if isinstance(x, Node) else None
    if not isinstance(x, Node) or value is None or value.dim() or x.op != "call_function":
        return {}
    out: dict[Node, None] = {}
    for given in x.all_input_nodes:
        out.update(_number(given))
    out[x] = None
    return out
