"""Per-leaf constants of an update rule, as runs of elements on this rank's pieces.

Masks and labels are callables on the logical tree; a flat piece is cut where their answer changes.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from typing import Any, NamedTuple

from torch import Tensor

from .. import tree
from ..sharding import is_sharded
from .base import LeafInfo


class Slot(NamedTuple):
    """One tensor of a tree (a piece, or a plain leaf), and the runs of equal constants in it."""

    index: int  # among the tree's flat tensors
    runs: list[tuple[int, int, Any]]  # (start, stop, constant)


def slots(params: Any, constant: Callable[[LeafInfo], Hashable]) -> Iterator[Slot]:
    """Every flat tensor of `params` in `tree.leaves` order, with the constants of the leaves in it."""
    paths, nodes, _ = tree.flatten_with_path(params, is_leaf=is_sharded)
    index = 0
    for path, node in zip(paths, nodes, strict=True):
        if not is_sharded(node):
            info = LeafInfo(tree.name_of(path), tuple(node.shape), node.dtype)
            yield Slot(index, [(0, node.numel(), constant(info))])
            index += 1
            continue
        for unit in node.layout.units:
            runs = unit.runs(*node.spec.bounds(unit), lambda x: constant(LeafInfo(x.name, x.shape, x.dtype)))
            yield Slot(index, runs)
            index += 1


def spread(params: Any, constant: Callable[[LeafInfo], float]) -> Any:
    """The tree of `params` with, for every tensor, its constants: a float, or a tensor where they differ."""
    leaves, treedef = tree.flatten(params)
    out: list[Any] = []
    for slot in slots(params, constant):
        out.append(_filled(leaves[slot.index], slot.runs))
    return tree.unflatten(treedef, out)


def _filled(like: Tensor, runs: list[tuple[int, int, float]]) -> Any:
    values = {c for _, _, c in runs}
    if len(values) <= 1:
        return next(iter(values), 0.0)
    out = like.new_zeros(like.shape)
    for a, b, c in runs:
        out[a:b] = c
    return out
