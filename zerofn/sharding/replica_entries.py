"""What each replica of a mesh has of its own, as one tree with an entry for each of them.

Ranks along `replicate` usually hold the same. Where replicas train apart, each has parameters and moments of its own. A
leaf [*shape] of theirs is then a leaf [replicas, *shape], of which a replica has the slice with its number: the shards
in memory are the same ones, under another spec. So a checkpoint, `load` and `unshard` know what such a leaf is, and a
step inside a replica sees [*shape], on a mesh of the replica's own ranks.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from .. import tree
from ..comm.axes import APART, USUAL
from ..comm.mesh import Axis, Mesh
from ..geometry.cuts import Cut
from ..geometry.layout import Layout, Leaf, Unit
from ..util.by_identity import ByIdentity
from .partition import Partition
from .sharded import Sharded, is_sharded
from .spec import Spec

_BARE = tree.structure(0)  # the tree of a tensor alone


@dataclass(frozen=True)
class Replicas:
    """The replicas along an axis of a mesh. `axis`: among which this rank's is one. `mesh`: the ranks of this replica.
    `apart`: all ranks, with replicas that have state of their own. `line`: the ranks that stand for this one in each
    replica, for what all ranks of a replica hold whole. `whole`: the mesh itself.
    """

    axis: Axis
    mesh: Mesh
    apart: Mesh
    line: Mesh
    whole: Mesh

    @staticmethod
    def of(mesh: Mesh, name: str) -> Replicas:
        """Return the replicas along the axis called `name`."""
        axis = mesh.axis(name)
        own = Axis(APART, axis.size, axis.rank, axis.group)
        inner = tuple(x for x in mesh.axes if x != axis) or (Axis(USUAL, 1),)
        apart = [own if x == axis else x for x in mesh.axes]
        ranks: tuple[int, ...] = ()
        if mesh.ranks:
            grid = torch.tensor(mesh.ranks).view([x.size for x in mesh.axes])
            ranks = tuple(grid.select(mesh.axes.index(axis), axis.rank).flatten().tolist())
        all_apart = Mesh((*apart, *(x for x in inner if x not in apart)), mesh.ranks)
        line = Mesh((own,), mesh.along(name) if mesh.ranks else ())
        return Replicas(axis, Mesh(inner, ranks), all_apart, line, mesh)

    @property
    def cut(self) -> Cut:
        """How the entries of a leaf are dealt out."""
        return cut_over(APART, self.axis.size)

    def entries(self, own: Any) -> Any:
        """Return a tree of a replica's own with a `Sharded` in place of each node, in the same memory.

        `own`: `Sharded` nodes, on the mesh of the replica or of all, and tensors, which all ranks of it hold whole.
        """
        return tree.tree_map(lambda x: self._entry(x) if is_sharded(x) else self._whole(x), own, is_leaf=is_sharded)

    def own(self, entries: Any) -> Any:
        """Return what `entries` was given, in the same memory, on the mesh of the replica."""
        return self._without(entries, _own)

    def together(self, entries: Any) -> Any:
        """Return what `entries` was given, in the same memory, on the mesh of all ranks: of replicas that are equal."""
        return self._without(entries, _together)

    def within(self, sharded: Sharded) -> Sharded:
        """Return a `Sharded` of the whole mesh as one of this replica alone."""
        return sharded.under(_spec(ByIdentity(sharded.spec), ByIdentity(self), _alone))

    def _entry(self, x: Sharded) -> Sharded:
        return x.under(_spec(ByIdentity(x.spec), ByIdentity(self), _with_entries))

    def _whole(self, x: Tensor) -> Sharded:
        return Sharded(_of_tensor(tuple(x.shape), x.dtype, ByIdentity(self)), [x.detach().reshape(-1)])

    def _without(self, entries: Any, change: Callable[[Spec, Replicas], Spec]) -> Any:
        def one(x: Sharded) -> Any:
            if [axis.name for axis in x.spec.mesh.axes] == [APART]:  # what ranks hold whole, unlike what they share
                return x.stored[0].decode().view(x.layout.leaves[0].shape[1:])
            return x.under(_spec(ByIdentity(x.spec), ByIdentity(self), change))

        return tree.tree_map(one, entries, is_leaf=is_sharded)


@functools.lru_cache(maxsize=1024)
def _spec(spec: ByIdentity, replicas: ByIdentity, change: Callable[[Spec, Replicas], Spec]) -> Spec:
    return change(spec.value, replicas.value)


def _alone(spec: Spec, replicas: Replicas) -> Spec:
    return Spec(spec.layout, replace(spec.partition, mesh=replicas.mesh))


def _with_entries(spec: Spec, replicas: Replicas) -> Spec:
    return Spec(with_entries(spec.layout, replicas.cut), replace(spec.partition, mesh=replicas.apart))


def _own(spec: Spec, replicas: Replicas) -> Spec:
    return _without_entries(spec, replicas.mesh)


def _together(spec: Spec, replicas: Replicas) -> Spec:
    return _without_entries(spec, replicas.whole)


def _without_entries(spec: Spec, mesh: Mesh) -> Spec:
    def own(leaf: Leaf) -> Leaf:
        cuts = tuple(replace(cut, dim=cut.dim - 1) for cut in leaf.cuts if cut.axis != APART)
        return replace(leaf, shape=leaf.shape[1:], cuts=cuts)

    return Spec(_changed(spec.layout, own), replace(spec.partition, mesh=mesh))


def cut_over(axis: str, size: int) -> Cut:
    """Return the cut of a leaf [size, ...] of which each rank along an axis has one entry."""
    return Cut(axis, 0, size, tuple(((k, k + 1),) for k in range(size)))


def with_entries(layout: Layout, cut: Cut) -> Layout:
    """Return the layout of leaves [entries, *shape], of which a rank has the entry that `cut` gives it."""

    def entry(leaf: Leaf) -> Leaf:
        cuts = tuple(replace(x, dim=x.dim + 1) for x in leaf.cuts)
        return replace(leaf, shape=(1, *leaf.shape), cuts=(cut, *cuts))

    return _changed(layout, entry)


def _changed(layout: Layout, change: Callable[[Leaf], Leaf]) -> Layout:
    units = tuple(replace(unit, leaves=tuple(map(change, unit.leaves))) for unit in layout.units)
    return Layout(units, layout.treedef, layout.axis)


@functools.lru_cache(maxsize=1024)
def _of_tensor(shape: tuple[int, ...], dtype: torch.dtype, replicas: ByIdentity) -> Spec:
    """Return the spec of a tensor that all ranks of a replica hold whole."""
    line, cut = replicas.value.line, replicas.value.cut
    leaf = Leaf("", (1, *shape), 0, 0, dtype, (cut,))
    unit = Unit("entry", (leaf,), leaf.numel, dtype.is_floating_point, dtype, 1)
    return Spec(Layout((unit,), _BARE, USUAL), Partition(mesh=line, shard_over=()))
