"""Which rank writes which part of a `Sharded`, and what the manifest says of it.

Ranks that have the same shard of the same slices are replicas: the first of them writes it. A slice that ranks with
other slices have, too, is written by the first of those. Units of experts, which are in slices along `expert`, and
others, which are in shards there, are written as two trees.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..comm.mesh import Axis
from ..geometry.cuts import counts
from ..sharding.sharded import Sharded
from ..sharding.storage import Stored
from ..util.errors import CheckpointError
from .manifest import SavedTree, SavedUnit, tree_as_json, tree_from_json
from .named_leaves import StatePart, leaves_of
from .tensor_file import TensorToWrite

Slices = tuple[int, ...]  # which slices a rank has: its places along the axes of slices


class Told(NamedTuple):
    """What a rank tells the others of a `Sharded`: which slices and which shard it has. `tree`: what the manifest says
    of its slices, from one of the ranks that have them.
    """

    slices: Slices
    shard: int
    tree: SavedTree | None

    @staticmethod
    def of(value: Any) -> Told:
        """Read what `OwnTree.told` returns."""
        slices, shard, tree = value
        return Told(tuple(slices), shard, None if tree is None else tree_from_json(tree))


@dataclass(frozen=True)
class OwnTree:
    """What this rank, or one with its slices, writes of a `Sharded`, or of some of its units.

    `tree`: without its files. `shard`: which of the shards this rank has. `slices`: the axes along which ranks have
    slices.
    """

    part: StatePart
    tree: SavedTree
    indices: tuple[int, ...]  # of the tree's units among those of the `Sharded`
    shard: int
    slices: tuple[Axis, ...]

    @staticmethod
    def of(part: StatePart, tensors: Iterable[str]) -> Iterator[OwnTree]:
        """`tensors`: what its units are called in files."""
        sharded: Sharded = part.value
        spec, leaves = sharded.spec, leaves_of(part)
        units = [
            SavedUnit(u.name, u.size, p.dtype, u.trainable, tensor)
            for u, p, tensor in zip(sharded.layout.units, sharded.stored, tensors, strict=True)
        ]
        cuts = [leaf.cuts for unit in sharded.layout.units for leaf in unit.leaves]
        groups: dict[bool, list[int]] = {}
        for k, unit in enumerate(sharded.layout.units):
            groups.setdefault(unit.of_experts, []).append(k)
        for experts, members in sorted(groups.items()):
            axis, slices = spec.axis_of(sharded.layout.units[members[0]]), spec.slices_of(experts)
            pairs = [(leaf, each) for leaf, each in zip(leaves, cuts, strict=True) if leaf.unit in members]
            # A slice without elements, as of a leaf that lies on another stage, is left out; an empty leaf is not.
            own = [x for x, each in pairs if counts(each, slices) and (x.numel or not math.prod(x.shape))]
            kept = members
            if packed := bool(spec.mesh.slices):
                kept = sorted({leaf.unit for leaf in own})
            numbered = tuple(replace(leaf, unit=kept.index(leaf.unit)) for leaf in own)
            there = tuple(units[k] for k in kept)
            tree = SavedTree(part.name, spec.stage, axis.size, (), there, numbered, packed)
            yield OwnTree(part, tree, tuple(kept), axis.rank, slices)

    def told(self) -> Any:
        """Return as JSON what the other ranks need to know."""
        first = all(axis.rank == 0 for axis in self.part.value.spec.mesh.axes if axis not in self.slices)
        tree = tree_as_json(self.tree) if self.tree.packed and first else None
        return [axis.rank for axis in self.slices], self.shard, tree

    def entries(self) -> list[TensorToWrite]:
        """Return what this rank writes, if it is the first of those that have it."""
        make = self._packed if self.tree.packed else self._own
        return [make(k, index) for k, index in enumerate(self.indices)]

    def _own(self, k: int, index: int) -> TensorToWrite:
        """Return this rank's N-th of a unit; at stage 0 a part of the whole unit, which it has."""
        sharded: Sharded = self.part.value
        cut = sharded.spec.own_cut(sharded.layout.units[index])
        return _entry(self.tree.units[k].tensor, sharded, index, [cut])

    def _packed(self, k: int, index: int) -> TensorToWrite:
        """Return the leaves of a tree in this rank's N-th of a unit, one after the other."""
        parts = [(x.offset + a, x.offset + b) for x, a, b, _ in self.tree.in_shard(k, self.shard)]
        return _entry(self.tree.units[k].tensor, self.part.value, index, parts)


def _entry(name: str, sharded: Sharded, index: int, parts: Sequence[tuple[int, int]]) -> TensorToWrite:
    """Return some elements of a unit, one after the other. `parts`: [start, stop) in the unit."""
    shard, first = sharded.stored[index], sharded.spec.bounds(sharded.layout.units[index])[0]
    total = sum(stop - start for start, stop in parts)
    held: list[Stored] = []  # a shard from a drive, while it is being written

    def read(a: int, b: int) -> Tensor:
        held[:] = held or [shard.loaded()]
        found, at = [], 0
        for start, stop in parts:
            low, high = max(a - at, 0), min(b - at, stop - start)
            if low < high:
                found.append(held[0].read(start - first + low, start - first + high))
            at += stop - start
        if b == total:
            held.clear()
        return found[0] if len(found) == 1 else torch.cat(found)

    return TensorToWrite(name, shard.dtype, (total,), read)


@dataclass(frozen=True)
class EveryTree:
    """What all ranks write of a `Sharded`. `writers`: (slices, shard) -> the first rank that has it; `slices`: of every
    rank; `trees`: slices -> what the manifest says of them, without files.
    """

    own: OwnTree
    writers: dict[tuple[Slices, int], int]
    slices: list[Slices]
    trees: dict[Slices, SavedTree]

    @staticmethod
    def of(what: str, own: OwnTree, told: Sequence[Told]) -> EveryTree:
        """`told[r]`: what rank r tells. Raises `CheckpointError` if a shard is on no rank."""
        writers = {(x.slices, x.shard): r for r, x in reversed(list(enumerate(told)))}
        trees: dict[Slices, SavedTree] = {x.slices: x.tree for x in told if x.tree is not None}
        if not own.tree.packed:
            trees = {(): own.tree}
        size = own.tree.num_shards
        for slices in sorted({x.slices for x in told}):
            there = [writers[slices, p] for p in range(size) if (slices, p) in writers]
            if len(there) != size:
                raise CheckpointError(
                    f"{what}: {own.part.name!r} is in {size} shards, but only ranks {sorted(there)} of its axis called "
                    "save. Every rank must call it."
                )
        return EveryTree(own, writers, [x.slices for x in told], trees)

    def writes(self, rank: int) -> bool:
        """Whether this rank, whose number is `rank`, writes what it has."""
        return rank in self.writers.values()

    def saved(self, file_of: Callable[[int], str]) -> list[SavedTree]:
        """Return what the manifest says. `file_of`: a rank's file."""
        return [
            replace(tree, files=tuple(file_of(self.writers[slices, p]) for p in range(tree.num_shards)))
            for slices, tree in sorted(self.trees.items(), key=lambda item: item[0])
            if tree.leaves or not tree.packed
        ]
