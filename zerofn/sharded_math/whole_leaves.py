"""Functions of whole leaves: gather a unit, compute, and keep this rank's shard of the result."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import Tensor

from .. import tree
from ..collectives.maps import ops
from ..comm.mesh import Mesh
from ..geometry.cuts import Cut, sliced
from ..ops import leaf_axes as _ops  # noqa: F401  (defines zerofn::take_shard)
from ..sharding.sharded import Sharded, is_sharded
from ..sharding.transfers import whole_leaves


def map_whole(rule: Callable[[Tensor], Tensor], values: Any) -> Any:
    """Apply `rule(leaf)` to every whole leaf of a tree, `Sharded` or plain. A result has its leaf's shape.

    Each unit of a `Sharded` is gathered in its own dtype: one all-gather a unit, with (N - 1) / N of its bytes
    received by each of N ranks, and none at stage 0; where ranks have slices of its leaves, one more along their axis.
    Leaves on stages of a pipeline are whole there, and are not sent.
    A rank runs the rule on the leaves of which it has a part, and keeps that part of the result, without further
    communication. Not differentiable. All ranks must call it.
    """
    return tree.tree_map(lambda x: _on_shards(rule, x) if is_sharded(x) else rule(x), values, is_leaf=is_sharded)


def _on_shards(rule: Callable[[Tensor], Tensor], values: Sharded) -> Sharded:
    shards, mesh = [], values.spec.mesh
    for unit, shard in zip(values.layout.units, values.shards, strict=True):
        start, stop = values.spec.bounds(unit)
        cuts = [leaf.cuts for leaf in unit.leaves]
        whole = whole_leaves(values.spec, unit, shard, across_stages=False)
        mine = {leaf.index for leaf, _, _ in unit.intervals(start, stop)}
        leaves = [
            sliced(rule(x), leaf.cuts, mesh) if leaf.index in mine else None
            for leaf, x in zip(unit.leaves, whole, strict=True)
        ]
        for k in _needed([leaf.index in mine for leaf in unit.leaves], cuts, mesh):
            leaves[k] = sliced(whole[k], cuts[k], mesh)
        offsets = [leaf.offset for leaf in unit.leaves]
        shards.append(ops.take_shard(leaves, offsets, start, stop, shard.dtype))
    return Sharded(values.spec, shards)


def _needed(mine: Sequence[bool], cuts: Sequence[Sequence[Cut]], mesh: Mesh) -> Iterator[int]:
    """Yield leaves without a part here that are used all the same: a gather needs a user on every rank."""
    for name in [None, *(axis.name for axis in mesh.slices if not axis.kind.stages)]:
        along = [k for k, each in enumerate(cuts) if name is None or any(cut.axis == name for cut in each)]
        if along and not any(mine[k] for k in along):
            yield along[0]
