"""Sums over some dims of logical leaves, and scaling along the others, without gathering the leaves.

A shard holds consecutive elements of a leaf, or of this rank's slice of it, so it can compute its part of every sum.
Only sums are sent. Where a dim is cut that sums keep, a slice has sums of its own; else it has a term of each. Leaves
are cut at the boundaries of ranks' shards at every stage, and parts are added in rank order: see [Note: order of sums]
in `reductions`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import tree
from ..collectives.over_ranks import ops, sum_over
from ..geometry.cuts import counts
from ..geometry.layout import LeafInfo
from ..geometry.overlaps import Region, Runs, overlap, region_of, shape_in
from ..ops import leaf_axes as _ops  # noqa: F401  (defines zerofn::squares_along and its like)
from ..sharding.sharded import Sharded, is_sharded, spec_among
from ..sharding.spec import Spec
from .reductions import rows_of

Kept = tuple[bool, ...]  # for each dim of a leaf: whether the sums keep it


class LeafSums(NamedTuple):
    """Sums of the `leaf`-th logical leaf, one for each position along the kept dims, in columns from `column` on."""

    leaf: int
    shape: tuple[int, ...]  # the leaf's
    kept: Kept
    column: int

    @property
    def own_shape(self) -> tuple[int, ...]:
        """The shape of the sums: the leaf's kept dims."""
        return tuple(n for n, keep in zip(self.shape, self.kept, strict=True) if keep)

    @property
    def numel(self) -> int:
        """The number of sums."""
        return math.prod(self.own_shape)

    @property
    def terms(self) -> int:
        """The number of elements that each sum adds up."""
        return math.prod(self.shape) // max(1, self.numel)

    def of(self, numbers: Tensor) -> Tensor:
        """Return this group's part of all sums [columns], in its shape."""
        return numbers[self.column : self.column + self.numel].view(self.own_shape)


class _Run(NamedTuple):
    """Elements [start, stop) of the `tensor`-th tensor. They belong to the leaf whose element `first` comes first."""

    tensor: int
    start: int
    stop: int
    first: int
    row: int
    leaf: int
    counts: bool  # False for a replicated leaf, or a slice, that another rank counts


def logical_leaves(values: Any) -> list[LeafInfo]:
    """Return the logical leaves of a tree, `Sharded` or plain, in order: their names and shapes in the plain tree."""
    paths, nodes, _ = tree.flatten_with_path(values, is_leaf=is_sharded)
    out = []
    for path, node in zip(paths, nodes, strict=True):
        if is_sharded(node):
            out += [LeafInfo(tree.name_of((*path, x.name)), x.whole, x.dtype) for x in node.layout.leaves]
        else:
            out.append(LeafInfo(tree.name_of(path), tuple(node.shape), node.dtype))
    return out


def groups_of(shapes: Sequence[tuple[int, ...]], kept: Sequence[Sequence[Kept]]) -> list[LeafSums]:
    """Return the groups of leaves with these `shapes`; `kept[k]` says which dims the k-th group keeps."""
    out, column = [], 0
    for k, (shape, each) in enumerate(zip(shapes, kept, strict=True)):
        for one in each:
            out.append(LeafSums(k, shape, one, column))
            column += out[-1].numel
    return out


def num_columns(groups: Sequence[LeafSums]) -> int:
    """Return the number of sums of all groups."""
    return groups[-1].column + groups[-1].numel if groups else 0


def axis_squares(values: Any, groups: Sequence[LeafSums]) -> Tensor:
    """Return sums of squares over the dims that are not kept, [columns], in float32 at least, with the same bits on
    every rank.

    One all-gather of the sums along each axis serves the whole tree. All ranks must call it.
    """
    flat, runs, spec, complete = _runs(values)
    axes = () if spec is None else spec.rows
    if not flat or not groups:
        return torch.zeros(0)
    num_all = num_columns(groups)
    groups, moves = _own_groups(values, spec, groups)
    chosen = [(run, g) for g in groups for run in runs[g.leaf] if run.counts]
    lists = ([getattr(run, name) for run, _ in chosen] for name in ("tensor", "start", "stop", "first", "row"))
    rows = math.prod(axis.size for axis in axes) if complete else 1
    grid = ops.squares_along(flat, *lists, *_columns([g for _, g in chosen]), rows, num_columns(groups))
    grid = ops.spread_columns(grid, *moves, num_all) if moves else grid
    grid = grid if complete else rows_of(grid[0], axes)
    total = grid[0]
    for row in grid[1:]:
        total = total + row
    for axis in () if spec is None else spec.mesh.slices:
        total = sum_over(total, axis)
    return total


def axis_scale(values: Any, groups: Sequence[LeafSums], factors: Tensor) -> Any:
    """Multiply every leaf by the numbers of all its groups, from `factors` [columns]. Leaves keep their dtypes."""
    flat, runs, spec, _ = _runs(values)
    groups, moves = _own_groups(values, spec, groups)
    factors = ops.own_columns(factors, *moves, num_columns(groups)) if moves else factors
    out = []
    for k, x in enumerate(flat):
        chosen = [(run, g) for g in groups for run in runs[g.leaf] if run.tensor == k]
        lists = ([getattr(run, name) for run, _ in chosen] for name in ("start", "stop", "first"))
        out.append(ops.scale_along(x, *lists, *_columns([g for _, g in chosen]), factors))
    return tree.unflatten(tree.structure(values), out)


def _columns(groups: Sequence[LeafSums]) -> tuple[list[int], list[int], list[int], list[bool]]:
    """Return the operations' arguments `column`, `ndim`, `sizes` and `kept`; a scalar counts as one dim."""
    shapes = [g.shape or (1,) for g in groups]
    kept = [g.kept or (True,) for g in groups]
    sizes = [n for shape in shapes for n in shape]
    return [g.column for g in groups], list(map(len, shapes)), sizes, [k for each in kept for k in each]


def _own_groups(values: Any, spec: Spec | None, groups: Sequence[LeafSums]) -> tuple[list[LeafSums], list[list[int]]]:
    """Return the groups of the slices that this rank has, and how their columns lie in those of whole leaves: nothing
    if all leaves are whole.
    """
    if spec is None or not spec.mesh.slices:
        return list(groups), []
    mesh = spec.mesh
    regions: list[Region] = []
    for node in tree.leaves(values, is_leaf=is_sharded):
        regions += [region_of(x.cuts, mesh) for x in node.layout.leaves] if is_sharded(node) else [()]
    own: list[LeafSums] = []
    columns: list[Runs] = []
    for g in groups:
        region = regions[g.leaf]
        own.append(LeafSums(g.leaf, shape_in(g.shape, region), g.kept, num_columns(own)))
        dims = [d for d, keep in enumerate(g.kept) if keep]
        kept = tuple((dims.index(d), intervals) for d, intervals in region if d in dims)
        for run in overlap(g.own_shape, (), kept, 0, own[-1].numel):
            columns.append(run._replace(start=g.column + run.start, at=own[-1].column + run.at))
    return own, [[run[k] for run in columns] for k in range(6)]


def _runs(values: Any) -> tuple[list[Tensor], dict[int, list[_Run]], Spec | None, bool]:
    """Return a tree's flat tensors, the runs of each leaf in them, a spec, and whether no other rank of its axis of
    shards has what is not here.
    """
    nodes = tree.leaves(values, is_leaf=is_sharded)
    spec = spec_among(nodes)
    complete = all(n.spec.is_whole for n in nodes if is_sharded(n))
    first_row = complete or spec is None or all(axis.rank == 0 for axis in spec.rows)
    once = first_row and (spec is None or counts((), spec.mesh.slices))
    flat: list[Tensor] = []
    runs: dict[int, list[_Run]] = {}
    for node in nodes:
        first, leaf = len(flat), len(runs)
        if is_sharded(node):
            runs.update({leaf + k: [] for k in range(len(node.layout.leaves))})
            for run in _sharded_runs(node, first, leaf):
                runs[run.leaf].append(run)
            flat.extend(node.shards)
        else:
            runs[leaf] = [_Run(first, 0, node.numel(), 0, 0, leaf, once)] if node.numel() else []
            flat.append(node)
    return flat, runs, spec, complete


def _sharded_runs(sharded: Sharded, tensor: int, leaf: int) -> Iterator[_Run]:
    for x in sharded.spec.stored_runs():
        yield _Run(tensor + x.unit, x.start, x.stop, x.first, x.row, leaf + x.leaf.index, x.counts)
