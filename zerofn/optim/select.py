"""Select a part of a tree by a mask on its logical leaves, and merge it back.

[Note: selections] In a plain tree, leaves that are not selected become None. In a `Sharded`, units without a selected
leaf disappear. In the other units, leaves that are not selected count as padding, which is never read. So an inner
transformation sees an ordinary tree and stays fused. It has moments for every unit with a selected leaf, and for the
whole of it: if leaves of one unit have two labels, the moments of both labels have the unit's size.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from .. import tree
from ..geometry.layout import restrict
from ..sharding.sharded import Sharded, is_sharded
from ..sharding.storage import stored
from .base import Mask
from .leaf_runs import leaf_info


def select(values: Any, keep: Mask) -> Any:
    """Return the part of a tree whose leaves `keep` selects. See [Note: selections]."""
    paths, nodes, treedef = tree.flatten_with_path(values, is_leaf=is_sharded)
    return tree.unflatten(treedef, [_select(path, x, keep) for path, x in zip(paths, nodes, strict=True)])


def _select(path: tree.Path, x: Any, keep: Mask) -> Any:
    if not is_sharded(x):
        return x if keep(leaf_info(path, x)) else None
    layout = restrict(x.layout, lambda _, leaf: bool(keep(leaf_info(path, leaf))))
    names = {unit.name for unit in layout.units}
    shards = [p for unit, p in zip(x.layout.units, x.stored, strict=True) if unit.name in names]
    return Sharded(dataclasses.replace(x.spec, layout=layout), shards)


def merge(whole: Any, part: Any, keep: Mask, by_runs: bool = False) -> Any:
    """Return `whole` with the leaves that `keep` selects taken from `part`, which is laid out as `select(whole,
    keep)`.

    `by_runs`: all other elements have the same bits in both, so a unit of `part` is taken without a copy.
    """
    paths, nodes, treedef = tree.flatten_with_path(whole, is_leaf=is_sharded)
    fresh = iter(tree.leaves(part, is_leaf=is_sharded))
    out = []
    for path, x in zip(paths, nodes, strict=True):
        if is_sharded(x):
            out.append(_merge(x, next(fresh), by_runs))
        else:
            out.append(next(fresh) if keep(leaf_info(path, x)) else x)
    return tree.unflatten(treedef, out)


def _merge(whole: Sharded, part: Sharded, by_runs: bool) -> Sharded:
    fresh = {unit.name: (unit, shard) for unit, shard in zip(part.layout.units, part.stored, strict=True)}
    shards = []
    for unit, old in zip(whole.layout.units, whole.stored, strict=True):
        mine, new = fresh.get(unit.name, (unit, old))
        if not by_runs and len(mine.leaves) < len(unit.leaves):
            runs = mine.runs(*whole.spec.bounds(unit), lambda leaf: True)
            starts, stops = [a for a, _, _ in runs], [b for _, b, _ in runs]
            new = stored(torch.ops.zerofn.take_runs(old.decode(), new.decode(), starts, stops))
        shards.append(new)
    return Sharded(whole.spec, shards)
