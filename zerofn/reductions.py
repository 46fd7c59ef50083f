"""Numbers over whole trees, sharded or plain: norms, dot products, finiteness.

[Note: order of sums] A leaf is cut where ranks' pieces are cut, at every stage; each part is reduced by
itself, the parts are combined in rank order, the leaves in the tree's order. So every stage gives the same
bits at a given number of ranks, and one rank gives those of `torch.nn.utils.get_total_norm`. Padding is
never read. One small all-gather serves a whole tree.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import tree
from .collectives import ops, rows_over
from .mesh import Axis
from .ops.parts import dtype_over  # with it come zerofn::part_norms and its like
from .sharding import Sharded, is_sharded


class _Part(NamedTuple):
    """Elements [start, stop) of the `tensor`-th tensor: of leaf `column`, on rank `row`."""

    tensor: int
    start: int
    stop: int
    row: int
    column: int


class _Parts(NamedTuple):
    """Every part of a tree that this rank has."""

    names: list[str]
    tensors: list[list[Tensor]]  # one list per tree
    parts: list[_Part]
    axis: Axis | None
    complete: bool  # no other rank has parts that are not here

    @staticmethod
    def of(*trees: Any) -> _Parts:
        paths, nodes, _ = tree.flatten_with_path(trees[0], is_leaf=is_sharded)
        others = [tree.leaves(t, is_leaf=is_sharded) for t in trees[1:]]
        found = _Parts(
            [],
            [[] for _ in trees],
            [],
            next((n.spec.axis for n in nodes if is_sharded(n)), None),
            all(n.spec.num_pieces == 1 for n in nodes if is_sharded(n)),
        )
        for k, node in enumerate(nodes):
            found._add(tree.name_of(paths[k]), [node, *(o[k] for o in others)])
        return found

    def _add(self, name: str, group: list[Any]) -> None:
        first = len(self.tensors[0])
        if is_sharded(group[0]):
            self.parts.extend(_sharded_parts(group[0], first, len(self.names)))
            prefix = f"{name}." if name else ""
            self.names.extend(prefix + leaf.name for leaf in group[0].layout.leaves)
        else:
            if (
                self.complete or self.axis is None or self.axis.rank == 0
            ):  # replicated: one rank counts it
                self.parts.append(_Part(first, 0, group[0].numel(), 0, len(self.names)))
            self.names.append(name)
        for tensors, x in zip(self.tensors, group, strict=True):
            tensors.extend(x.pieces if is_sharded(x) else [x.reshape(-1)])

    def reduce(self, op: Any) -> Tensor:
        """One number per part -> [ranks, leaves], zero where a rank has nothing of a leaf."""
        size = 1 if self.axis is None else self.axis.size
        rows = size if self.complete else 1
        parts = [p for p in self.parts if p.stop > p.start]
        if not parts:
            like = self.tensors[0]  # what other ranks have parts of decides the dtype
            device = like[0].device if like else None
            grid = torch.zeros(rows, len(self.names), dtype=dtype_over(like), device=device)
        else:
            grid = op(*self.tensors, *map(list, zip(*parts, strict=True)), rows, len(self.names))
        return grid if self.complete or self.axis is None else rows_over(grid[0], self.axis)


def _sharded_parts(sharded: Sharded, first: int, column: int) -> Iterator[_Part]:
    spec = sharded.spec
    whole = spec.num_pieces == 1
    for i, unit in enumerate(spec.layout.units):
        begin = spec.bounds(unit)[0]
        for rank in range(spec.axis.size) if whole else [spec.axis.rank]:
            start, stop = spec.layout.cut(unit, rank)
            for leaf, a, b in unit.intervals(start, stop):
                shift = start - begin
                yield _Part(
                    first + i, a + shift, b + shift, rank if whole else 0, column + leaf.index
                )


def leaf_norms(values: Any) -> dict[str, Tensor]:
    """The 2-norm of every leaf, by name, in float32 at least."""
    names, numbers = norms(values)
    return dict(zip(names, numbers.unbind(), strict=True))


def norms(values: Any) -> tuple[list[str], Tensor]:
    """The names of all leaves, and their 2-norms [leaves], the same bits on every rank."""
    parts = _Parts.of(values)
    return parts.names, _norms(parts)


def _norms(parts: _Parts) -> Tensor:
    grid = parts.reduce(ops.part_norms)
    return grid[0] if len(grid) == 1 else torch.linalg.vector_norm(grid, dim=0)


def global_norm(values: Any) -> Tensor:
    """The 2-norm over all leaves and ranks, a scalar, the same bits on every rank."""
    return torch.linalg.vector_norm(_norms(_Parts.of(values)))


def vdot(a: Any, b: Any) -> Tensor:
    """The inner product of two trees of one structure, a scalar, the same bits on every rank.

    Raises `ValueError` where structures or layouts differ.
    """
    if tree.structure(a) != tree.structure(b):
        raise ValueError("vdot: the two trees are not of one structure and layout; where one is sharded and the other "
                         "not, write zerofn.scatter(tree, like=sharded) first.")
    grid = _Parts.of(a, b).reduce(ops.part_dots)
    total = grid[0]
    for row in grid[1:]:
        total = total + row
    return total.sum()


def _extremes(values: Any) -> tuple[list[str], Tensor]:
    parts = _Parts.of(values)
    return parts.names, parts.reduce(ops.part_extremes).amax(0)


def all_finite(values: Any) -> Tensor:
    """Whether every element on every rank is finite: a bool scalar on the device, the same on every rank."""
    return torch.isfinite(_extremes(values)[1]).all()


def first_nonfinite(values: Any) -> str | None:
    """The name of the first leaf with a non-finite element on any rank, or None. Waits for the device."""
    names, ends = _extremes(values)
    return next(
        (n for n, e in zip(names, ends.tolist(), strict=True) if not math.isfinite(e)), None
    )
