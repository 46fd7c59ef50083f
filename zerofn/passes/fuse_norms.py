"""Take each gradient's norm and finite check as soon as it is complete."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from ..graph.alias import positions, roots, with_writers
from ..graph.edit import behind, clean
from ..graph.node_kinds import argument, arguments
from ..ops.part_reductions import NORMS_AND_EXTREMES
from ._context import Context

ops = torch.ops.zerofn
# A tensor, [start, stop) of its parts, and its last writer before the reduction.
_Key = tuple[Node, tuple[tuple[int, int], ...], Node | None]


def fuse_norms(gm: GraphModule, context: Context) -> None:
    """Split reductions over many tensors into one for each tensor, right after the tensor is complete.

    This one reads the tensor once, for the norm and the finite check, while it is in the cache. The original place only
    combines the numbers. The values are the same, bit for bit. `raise_unscale` runs before, so gradients are complete
    early; `gradients_as_bucket_views` has made the writes that complete a bucket.
    """
    graph = gm.graph
    where, root = positions(graph), roots(graph)
    tensors: dict[Node, list[tuple[_Key, list[int]]]] = {}
    for node, writer in with_writers(graph, root):
        if node.target in NORMS_AND_EXTREMES:
            tensors[node] = [((x, parts, writer.get(root[x])), places) for x, parts, places in _by_tensor(node)]
    keys = dict.fromkeys(key for each in tensors.values() for key, _ in each)
    found = {key: _reduce(graph, key, where) for key in keys}
    for node, each in tensors.items():
        numbers = [(found[key][node.target], places) for key, places in each]
        with graph.inserting_before(node):
            grid = graph.call_function(
                ops.grid.default,
                (
                    [x for x, _ in numbers],
                    [p for _, places in numbers for p in places],
                    argument(node, "num_rows"),
                    argument(node, "num_columns"),
                ),
            )
        grid.meta["val"] = node.meta["val"]
        node.replace_all_uses_with(grid)
    clean(gm)


def _by_tensor(node: Node) -> list[tuple[Node, tuple[tuple[int, int], ...], list[int]]]:
    """For each tensor of a reduction, return (it, its parts, the positions of their numbers in the result)."""
    given = arguments(node)
    tensors, shard, start, stop = (given[name] for name in ("tensors", "shard", "start", "stop"))
    row, column, num_columns = given["row"], given["column"], given["num_columns"]
    parts: dict[int, list[int]] = {k: [] for k in range(len(tensors))}  # also tensors without parts on this rank
    for i, k in enumerate(shard):
        parts[k].append(i)
    return [
        (tensors[k], tuple((start[i], stop[i]) for i in mine), [row[i] * num_columns + column[i] for i in mine])
        for k, mine in parts.items()
    ]


def _reduce(graph: Graph, key: _Key, where: dict[Node, int]) -> dict[Any, Node]:
    """Reduce one tensor right after it is complete; return kind -> its numbers. `clean` drops unread ones."""
    tensor, parts, complete = key
    starts, stops = [a for a, _ in parts], [b for _, b in parts]
    after = max([tensor, *([complete] if complete else [])], key=where.__getitem__)
    with graph.inserting_after(behind(after)):
        both = graph.call_function(ops.part_numbers.default, (tensor, starts, stops))
    with graph.inserting_after(both):
        return {kind: graph.call_function(operator.getitem, (both, k)) for k, kind in enumerate(NORMS_AND_EXTREMES)}
