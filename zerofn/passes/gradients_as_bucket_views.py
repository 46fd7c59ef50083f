"""Compute gradients directly in the bucket from which they are sent."""

from __future__ import annotations

import torch
from torch.fx import Graph, GraphModule, Node

from ..graph.alias import is_view, positions, sources
from ..graph.edit import clean
from ..graph.node_kinds import argument, is_batched
from ..graph.program import tensor_of
from ..graph.running_sums import add_in_place
from ..ops.registry import OUT_GRADIENT
from ._context import Context

ops = torch.ops.zerofn


def gradients_as_bucket_views(gm: GraphModule, context: Context) -> None:
    """Let the operation that makes a leaf's gradient write into the unit's flat bucket, if it has an out= form.

    This saves the copy into the bucket. The bucket is made before those operations. Other leaves are still copied into
    it. What a piece of a pipeline adds to the gradients of earlier microbatches is added there, leaf by leaf, and has
    no bucket. The values are the same, bit for bit.
    """
    add_in_place(gm.graph)
    where = positions(gm.graph)
    for node in list(where):
        if node.target is ops.ravel.default and not is_batched(node):
            _place(gm.graph, node, where)
    clean(gm)


def _place(graph: Graph, ravel: Node, where: dict[Node, int]) -> None:
    """`where`: positions; a new node takes the position of the node that it is put before."""
    leaves: list[Node | None] = argument(ravel, "leaves")
    offsets, size, dtype = (argument(ravel, name) for name in ("offsets", "size", "dtype"))
    makers: list[Node | None] = []
    seen: set[Node | None] = set()
    for leaf in leaves:
        maker = _maker(leaf, dtype)
        makers.append(None if maker in seen else maker)  # an operation writes to one place
        seen.add(maker)
    last = max((_memory(x) for x in leaves if x is not None), key=where.__getitem__)
    if last.op == "placeholder":
        return
    # If no leaf is made in the bucket, make it before the last leaf. Values cast into it are then freed behind it,
    # and leave no hole that malloc, a few alignment bytes short, could not reuse for the next bucket of this size.
    first = min((m for m in makers if m is not None), key=where.__getitem__, default=last)
    device = tensor_of(ravel).device  # type: ignore[union-attr]
    with graph.inserting_before(first):
        flat = graph.call_function(ops.flat.default, (size,), {"dtype": dtype, "device": device})
    flat.meta["val"] = ravel.meta["val"]
    where[flat] = where[first]
    numels = [0 if x is None else tensor_of(x).numel() for x in leaves]  # type: ignore[union-attr]
    parts: dict[Node, Node] = {}
    for maker, offset in zip(makers, offsets, strict=True):
        if maker is not None:
            parts[maker] = _write_to(graph, maker, flat, offset)
            where[parts[maker]] = where[maker]
    # A leaf whose maker writes for another leaf is already a part of the bucket, and is copied from there.
    rest = [
        None if m is not None else None if x is None else parts.get(x, x) for x, m in zip(leaves, makers, strict=True)
    ]
    with graph.inserting_before(ravel):
        graph.call_function(ops.fill_.default, (flat, rest, offsets, numels, [m is not None for m in makers]))
    ravel.replace_all_uses_with(flat)
    graph.erase_node(ravel)
    for maker, part in parts.items():  # once: each change would rebuild all arguments of `ravel`
        maker.replace_all_uses_with(part)
        graph.erase_node(maker)


def _memory(node: Node) -> Node:
    """Return the node that made the memory of `node`."""
    while is_view(node):
        node = sources(node)[0]
    return node


def _maker(leaf: Node | None, dtype: torch.dtype) -> Node | None:
    """Return the operation that makes this gradient, if nothing else reads it and it can write to given memory."""
    node = leaf
    while node is not None and len(node.users) == 1 and is_view(node):
        value, source = tensor_of(node), tensor_of(sources(node)[0])
        if value is None or source is None or not (value.is_contiguous() and source.is_contiguous()):
            return None
        if value.numel() != source.numel():
            return None
        node = sources(node)[0]
    if node is None or len(node.users) != 1 or node.target not in OUT_GRADIENT:
        return None
    value = tensor_of(node)
    inputs = [tensor_of(x) for x in node.all_input_nodes]
    same = all(x is not None and x.dtype == dtype for x in inputs)
    return node if value is not None and value.is_contiguous() and value.dtype == dtype and same else None


def _write_to(graph: Graph, maker: Node, flat: Node, offset: int) -> Node:
    """Let `maker` write to a part of a bucket, and return that part, which replaces its result."""
    value = tensor_of(maker)
    with graph.inserting_before(maker):
        part = graph.call_function(ops.part.default, (flat, offset, list(value.shape)))  # type: ignore[union-attr]
        part.meta["val"] = value
        out = graph.call_function(OUT_GRADIENT[maker.target], maker.args, {**maker.kwargs, "out": part})  # type: ignore[index]
    out.meta.update(maker.meta)
    return part
