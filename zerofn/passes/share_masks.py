"""Let all layers save one attention mask."""

from __future__ import annotations

import operator

import torch
from torch.fx import Graph, GraphModule, Node

from .._torch_compat import OpOverload
from ..graph.alias import roots, written_memory
from ..graph.edit import clean, merge_equal
from ..graph.node_kinds import arguments
from ..ops.registry import EMPTY, may_write
from ._context import Context

_MASKS = {"attn_mask", "attn_bias"}  # arguments of attention


def share_masks(gm: GraphModule, context: Context) -> None:
    """Merge equal values of which nothing is made but masks of attention.

    Attention makes numbers of a mask of booleans, and saves them for its backward pass: without this, once in each
    layer. A segment under `torch.utils.checkpoint` would make them again; one mask is less than those of two segments.
    """
    merge_equal(_only_masks(gm.graph))
    clean(gm)


def _only_masks(graph: Graph) -> list[Node]:
    """Return, in order, the nodes that compute a mask of attention, or what only masks are made of."""
    root = roots(graph)
    written = written_memory(root)
    found: dict[Node, None] = {}
    for node in reversed(graph.nodes):
        pure = (
            _is_pure(node) and root[node] not in written and all(root[x] not in written for x in node.all_input_nodes)
        )
        if pure and node.users and all(user in found or _is_mask_of(node, user) for user in node.users):
            found[node] = None
    return list(reversed(found))


def _is_pure(node: Node) -> bool:
    target = node.target
    if target is operator.getitem:
        return True
    return (
        isinstance(target, OpOverload)
        and target.namespace == "aten"
        and target not in EMPTY
        and not may_write(target)
        and torch.Tag.nondeterministic_seeded not in target.tags
    )


def _is_mask_of(node: Node, user: Node) -> bool:
    """Return whether attention takes a value as its mask, and as nothing else."""
    if not isinstance(user.target, OpOverload):
        return False
    uses = {name for name, x in arguments(user).items() if x is node}
    return bool(uses) and uses <= _MASKS
