"""Let all layers save one attention mask."""

from __future__ import annotations

import operator

import torch
from torch.fx import Graph, GraphModule, Node

from .._torch_compat import OpOverload
from ..graph.alias import roots, written_memory
from ..graph.edit import clean, merge_equal
from ..graph.node_kinds import arguments
from ..ops.registry import EMPTY, argument_places, may_write
from ._context import Context

_MASKS = {"attn_mask", "attn_bias"}  # arguments of attention


def share_masks(gm: GraphModule, context: Context) -> None:
    """Merge equal values of which nothing is made but masks of attention.

    Attention makes numbers of a mask of booleans, and saves them for its backward pass: without this, once in each
    layer. A segment under `torch.utils.checkpoint` would make them again; one mask is less than those of two segments.
    """
    masks = [x for node in gm.graph.nodes for x in _masks_of(node)]
    if len(set(masks)) > 1:
        merge_equal(_only_masks(gm.graph, masks))
        clean(gm)


def _masks_of(node: Node) -> list[Node]:
    """Return what attention takes as its mask, and as nothing else."""
    places = _places(node.target)
    if not places:
        return []
    given = arguments(node)
    others = [x for name, x in given.items() if name not in _MASKS]
    return [given[name] for name in places if isinstance(given[name], Node) and given[name] not in others]


def _places(target: object) -> list[str]:
    return [x for x in _MASKS if x in argument_places(target)] if isinstance(target, OpOverload) else []


def _only_masks(graph: Graph, masks: list[Node]) -> list[Node]:
    """Return, in order, the nodes that compute a mask of attention, or what only masks are made of."""
    root = roots(graph)
    written = written_memory(root)
    reached, found = set(masks), dict[Node, None]()
    for node in reversed(graph.nodes):
        if node not in reached or not _is_pure(node):
            continue
        stays = all(root[x] not in written for x in (node, *node.all_input_nodes))
        if stays and all(user in found or node in _masks_of(user) for user in node.users):
            found[node] = None
            reached.update(node.all_input_nodes)
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
