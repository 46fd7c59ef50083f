"""What each rank has of its own and whole, as one tree with an entry for each rank: gradients before their sum, and
what an optimizer's codes have left out of them.

As with replicas that train apart (`replica_entries`), a leaf [*shape] becomes a leaf [ranks, *shape], of which a rank
has the slice with its number. So checkpoints, norms and checks know what it is. Ranks are those with other parts of the
batch, along one axis.
"""

from __future__ import annotations

import functools
from dataclasses import replace

import torch
from torch import Tensor

from ..comm.axes import RANKS
from ..comm.mesh import Axis, Mesh
from ..util.by_identity import ByIdentity
from .replica_entries import cut_over, with_entries
from .sharded import Sharded
from .spec import Spec


def of_ranks(spec: Spec) -> Spec:
    """Return the spec of entries of a tree that a rank has whole: for one spec always the same object."""
    return _of_ranks(ByIdentity(spec))


def in_shards(spec: Spec) -> Spec:
    """Return the spec of a tree that is cut over ranks at every stage, also at stage 0."""
    return _in_shards(ByIdentity(spec))


def zeros_of_ranks(like: Sharded) -> Sharded:
    """Return an entry of zeros for each rank."""
    return _zeros(of_ranks(like.spec), like)


def zeros_in_shards(like: Sharded) -> Sharded:
    """Return zeros that are cut over ranks at every stage."""
    return _zeros(in_shards(like.spec), like)


def own_entry(entries: Tensor, axis: Axis) -> Tensor:
    """entries [n, *shape] of any number of ranks -> [1, *shape], this one's: the sum of entries rank, rank + size, ...,
    or zeros. So all entries together have the same sum, and of as many ranks each has its own.
    """
    mine = entries[axis.rank :: axis.size]
    return functools.reduce(torch.add, mine.split(1)) if len(mine) else torch.zeros_like(entries[:1])


def _zeros(spec: Spec, like: Sharded) -> Sharded:
    sizes = [stop - start for start, stop in map(spec.bounds, spec.layout.units)]
    pairs = zip(sizes, like.stored, strict=True)
    return Sharded(spec, [torch.zeros(size, dtype=wide(x.dtype), device=x.device) for size, x in pairs])


def wide(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of what is left out of numbers: float32 at least."""
    return torch.promote_types(dtype, torch.float32)


@functools.lru_cache(maxsize=1024)
def _of_ranks(spec: ByIdentity) -> Spec:
    mesh = _mesh_of_ranks(ByIdentity(spec.value.mesh))
    layout, partition = with_entries(spec.value.layout, cut_over(RANKS, mesh.axes[0].size)), spec.value.partition
    whole = replace(layout, units=tuple(replace(unit, num_shards=1) for unit in layout.units))
    return Spec(whole, replace(partition, mesh=mesh, shard_over=(), copy_over=()))


@functools.lru_cache(maxsize=1024)
def _in_shards(spec: ByIdentity) -> Spec:
    partition = spec.value.partition
    over = partition.shard_over or ("shards",)
    return Spec(spec.value.layout, replace(partition, shard_over=over, copy_over=(), late=False))


@functools.lru_cache(maxsize=64)
def _mesh_of_ranks(mesh: ByIdentity) -> Mesh:
    """Return the mesh with one axis in place of those along which ranks have other parts of the batch, the first."""
    batch, axes = mesh.value.batch, mesh.value.axes
    own = Axis(RANKS, batch.size, batch.rank, batch.group)
    ranks: tuple[int, ...] = ()
    if mesh.value.ranks:
        order = sorted(range(len(axes)), key=lambda k: not axes[k].kind.batch)
        grid = torch.tensor(mesh.value.ranks).view([x.size for x in axes])
        ranks = tuple(grid.permute(order).flatten().tolist())
    return Mesh((own, *(x for x in axes if not x.kind.batch)), ranks)
