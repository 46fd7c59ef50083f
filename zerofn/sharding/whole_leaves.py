"""Functions of whole leaves: gather a unit, compute, and keep this rank's shard of the result."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from .. import tree
from ..collectives.maps import AllGather, ops
from ..ops import leaf_axes as _ops  # noqa: F401  (defines zerofn::take_shard)
from .layout import Unit, unravel
from .sharded import Sharded, Spec, is_sharded, refuse_slices


def map_whole(rule: Callable[[Tensor], Tensor], values: Any) -> Any:
    """Apply `rule(leaf)` to every whole leaf of a tree, `Sharded` or plain. A result has its leaf's shape.

    Each unit of a `Sharded` is gathered in its own dtype: one all-gather a unit, with (N - 1) / N of its bytes
    received by each of N ranks, and none at stage 0. A rank runs the rule on the leaves of which it has a part, and
    keeps that part of the result, without further communication. Not differentiable. All ranks must call it.
    """
    refuse_slices(values, "an optimizer of whole matrices")
    return tree.tree_map(lambda x: _on_shards(rule, x) if is_sharded(x) else rule(x), values, is_leaf=is_sharded)


def _on_shards(rule: Callable[[Tensor], Tensor], values: Sharded) -> Sharded:
    shards = []
    for unit, shard in zip(values.layout.units, values.shards, strict=True):
        start, stop = values.spec.bounds(unit)
        whole = unravel(_whole(values.spec, unit, shard), unit)
        mine = {leaf.index for leaf, _, _ in unit.intervals(start, stop)}
        leaves = [rule(x) if leaf.index in mine else None for leaf, x in zip(unit.leaves, whole, strict=True)]
        if not mine:  # a gather needs a user on every rank
            leaves[0] = whole[0]
        offsets = [leaf.offset for leaf in unit.leaves]
        shards.append(ops.take_shard(leaves, offsets, start, stop, shard.dtype))
    return Sharded(values.spec, shards)


def _whole(spec: Spec, unit: Unit, shard: Tensor) -> Tensor:
    return ops.as_whole(shard) if spec.num_shards == 1 else AllGather(spec.axis, unit.name)(shard)[0]
