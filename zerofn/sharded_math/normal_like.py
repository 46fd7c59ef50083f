"""Normal noise in the layout of a tree, the same on any number of ranks."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, TypeVar

import torch
from torch import Tensor

from .. import tree
from ..geometry.layout import Leaf
from ..geometry.overlaps import overlap, region_of
from ..random import noise as _noise  # noqa: F401  (defines zerofn::normal_shard and its like)
from ..random.draws import check_scalar
from ..sharding.sharded import Sharded, is_sharded

ops = torch.ops.zerofn

T = TypeVar("T")


def normal_like(values: T, key: Tensor) -> T:
    """Return a tree like `values`, `Sharded` or plain, of independent draws from the standard normal distribution.

    `values`: a tree of floating tensors. `key`: a random key, an int64 scalar on the CPU. The draw for an element
    depends on the key, the position of its leaf in the tree and its position in the leaf, so the noise has the same
    bits at every stage, on any mesh and in a plain tree (on one type of device). Use it for Langevin dynamics, or for
    the noise of DP-SGD. `torch.randn_like` on a shard is refused, because it would draw the same noise on every rank.
    Use each key for one tree only: `zerofn.random.fold_in(state.rng_at(), 1)` for the first tree, for example, and
    `fold_in(state.rng_at(), 2)` for the second.

    Leaves have the shapes, dtypes and devices of `values`. Not differentiable. Raises `TypeError` if `key` is not such
    a key, or a leaf is not floating-point.

    >>> import zerofn
    >>> params = {"w": torch.zeros(3)}
    >>> noise = zerofn.normal_like(params, zerofn.random.key(0))
    >>> shards = zerofn.normal_like(zerofn.shard({"params": params})["params"], zerofn.random.key(0))
    >>> torch.equal(zerofn.gather(shards)["w"], noise["w"])
    True
    """
    check_scalar(key, "normal_like", "the key")
    nodes, treedef = tree.flatten(values, is_leaf=is_sharded)
    out: list[Any] = []
    index = 0  # of the logical leaf
    for node in nodes:
        if is_sharded(node):
            out.append(_of_sharded(node, key, index))
            index += len(node.layout.leaves)
        else:
            _check(node)
            out.append(ops.normal_leaf(key, node, index))
            index += 1
    return tree.unflatten(treedef, out)


def _of_sharded(values: Sharded, key: Tensor, index: int) -> Sharded:
    shards = []
    for unit, shard in zip(values.layout.units, values.shards, strict=True):
        _check(shard)
        start, stop = values.spec.bounds(unit)
        if any(leaf.cuts for leaf in unit.leaves):
            runs = [run for x, a, b in unit.intervals(start, stop) for run in _of_slice(values, x, index, start, a, b)]
            shards.append(ops.normal_slices(key, shard, *([r[k] for r in runs] for k in range(8))))
            continue
        parts = [(x.index + index, x.numel, start + a - x.offset, a, b) for x, a, b in unit.intervals(start, stop)]
        shards.append(ops.normal_shard(key, shard, *([p[k] for p in parts] for k in range(5))))
    return Sharded(values.spec, shards)


def _of_slice(values: Sharded, x: Leaf, index: int, begin: int, a: int, b: int) -> Iterator[tuple[int, ...]]:
    """Yield what `normal_slices` takes of a leaf of which the shard, from `begin` on, has elements [a, b)."""
    first = begin - x.offset
    for run in overlap(x.whole, (), region_of(x.cuts, values.spec.mesh), first + a, first + b):
        place = (x.index + index, math.prod(x.whole), run.start, a + run.at)
        yield *place, run.length, run.count, run.step, run.stride


def _check(x: Any) -> None:
    if not (isinstance(x, Tensor) and x.is_floating_point()):
        kind = x.dtype if isinstance(x, Tensor) else type(x).__name__
        raise TypeError(f"normal_like: expected floating-point tensors, got {kind}; leave such leaves out.")
