"""Per-leaf constants of an update rule, as runs of elements on this rank's shards.

Masks and labels are functions of logical leaves. A flat shard is cut into runs where their answers change.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import tree
from ..geometry.layout import Leaf
from ..ops import runs as _runs  # noqa: F401  (defines zerofn::fill_runs and its like)
from ..sharding.sharded import is_sharded
from .base import LeafInfo


class TensorRuns(NamedTuple):
    """One tensor of a tree (a shard or a plain leaf), and its runs of equal constants."""

    place: int  # index among the tree's flat tensors
    runs: list[tuple[int, int, Any]]  # (start, stop, constant)
    offset: int  # index of the first element in its unit
    among: frozenset[Any]  # the constants of the whole unit, on all ranks

    @property
    def columns(self) -> tuple[list[int], list[int], list[Any]]:
        """Return the starts, the stops and the constants of the runs."""
        return [a for a, _, _ in self.runs], [b for _, b, _ in self.runs], [c for _, _, c in self.runs]


def leaf_info(path: tree.Path, leaf: Tensor | Leaf) -> LeafInfo:
    """Return a leaf's name in the plain tree, its whole shape and its dtype.

    `leaf`: a plain leaf at `path`, or a logical leaf of the `Sharded` at `path`.
    """
    if isinstance(leaf, Leaf):
        return LeafInfo(tree.name_of((*path, leaf.name)), leaf.whole, leaf.dtype)
    return LeafInfo(tree.name_of(path), tuple(leaf.shape), leaf.dtype)


def slots(params: Any, constant: Callable[[LeafInfo], Hashable]) -> Iterator[TensorRuns]:
    """Yield a slot for each flat tensor of `params`, in the order of `tree.leaves`.

    `constant(leaf)`: the constant of a logical leaf.
    """
    paths, nodes, _ = tree.flatten_with_path(params, is_leaf=is_sharded)
    index = 0
    for path, node in zip(paths, nodes, strict=True):
        if not is_sharded(node):
            value = constant(leaf_info(path, node))
            yield TensorRuns(index, [(0, node.numel(), value)], 0, frozenset([value]))
            index += 1
            continue
        ask = partial(_ask, constant, path)
        for unit in node.layout.units:
            start, stop = node.spec.bounds(unit)
            known = {leaf.index: ask(leaf) for leaf in unit.leaves}
            runs = unit.runs(start, stop, lambda leaf, known=known: known[leaf.index])
            yield TensorRuns(index, runs, start, frozenset(known.values()))
            index += 1


def _ask(constant: Callable[[LeafInfo], Hashable], path: tree.Path, leaf: Leaf) -> Hashable:
    return constant(leaf_info(path, leaf))


def map_runs(rule: Callable[..., Any], constant: Callable[[LeafInfo], Hashable], *trees: Any) -> list[Any]:
    """Call `rule(tensors, offset, starts, stops, constants)` at every position of `trees`; return trees of its
    results.

    `trees`: parameters, gradients, then moments. `tensors` has one tensor of each. `rule` returns a tuple: the new
    parameter, then each new moment. The result is a list of one tree for each of these, in the structure of the old
    one; it is empty if there are no leaves. Raises `ValueError` if the trees differ in shapes.
    """
    flat, treedefs = zip(*map(tree.flatten, trees), strict=True)
    first = flat[0]
    for k, leaves in enumerate(flat):
        if [x.shape for x in leaves] != [x.shape for x in first]:
            what = "the gradients" if k == 1 else "the state's moments"
            raise ValueError(
                f"optim: {what} do not have the shapes of the parameters: expected {[list(x.shape) for x in first]}, "
                f"got {[list(x.shape) for x in leaves]}. Compute the gradients with value_and_grad for these "
                "parameters, and the state with this transformation's init."
            )
    fresh = [rule([f[slot.place] for f in flat], slot.offset, *slot.columns) for slot in slots(trees[0], constant)]
    if not fresh:
        return []
    own = [treedefs[0], *treedefs[2:]]  # each its own structure, which says how its shards are stored
    return [tree.unflatten(treedef, column) for treedef, column in zip(own, zip(*fresh, strict=True), strict=True)]


def spread(params: Any, constant: Callable[[LeafInfo], float]) -> Any:
    """Return `params` with constants in place of tensors: a float, or a tensor where leaves of a unit differ.

    Which of both does not depend on the rank, so that all ranks compute in the same way.
    """
    leaves, treedef = tree.flatten(params)

    def values(slot: TensorRuns) -> Any:
        starts, stops, constants = slot.columns
        if len(slot.among) <= 1:
            return next(iter(slot.among), 0.0)
        return torch.ops.zerofn.fill_runs(leaves[slot.place], starts, stops, constants)

    return tree.unflatten(treedef, [values(slot) for slot in slots(params, constant)])
