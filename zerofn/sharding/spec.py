"""Over which ranks the units of a `Sharded` are cut, and along which axes they are gathered.

A unit is cut into shards over the ranks of one axis: along `data` and `context`, and along `expert` too unless it
consists of experts. Each of these parts may be cut once more, along `replicate` (see `Partition`), and parameters hold
such a part as a copy, from which units are gathered among the ranks of a node.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch

from ..comm.axes import RANKS
from ..comm.mesh import Axis, Mesh
from ..geometry.cuts import counts
from ..geometry.layout import Layout, Leaf, Unit, restrict
from ..ops.kernel_args import BLOCK
from .float8 import Fp8
from .partition import Partition
from .precision import Precision
from .storage import StorageSpec
from .wire import CODED, block_in, codec_of

_signatures: dict[Any, int] = {}


class StoredShard(NamedTuple):
    """Elements [start, stop) of a unit. `row`: where a rank that has all shards puts its sums; see `Spec.rows`. `mine`:
    False for a shard of another rank along `expert`, which counts it.
    """

    start: int
    stop: int
    row: int
    mine: bool


class StoredRun(NamedTuple):
    """Elements [start, stop) of this rank's tensor of unit `unit`: those of `leaf` from its element `first` on. `row`:
    see `StoredShard`. `counts`: whether no rank before this one has the same elements.
    """

    unit: int
    start: int
    stop: int
    leaf: Leaf
    first: int
    row: int
    counts: bool


@functools.lru_cache(maxsize=4096)
def _float8_codec(unit: Unit, rule: Fp8, block: int) -> str:
    return codec_of(unit, "fp8", block, lambda leaf: rule.gathers(leaf.name, leaf.shape))


@dataclass(frozen=True)
class Spec:
    """The static part of a `Sharded`. Equal specs have equal layouts: what is stored where does not count."""

    layout: Layout
    partition: Partition = field(compare=False)

    @property
    def mesh(self) -> Mesh:
        """The ranks, and what each axis of them shares."""
        return self.partition.mesh

    @property
    def precision(self) -> Precision:
        """The dtypes of parameters, and the wire codec."""
        return self.partition.precision

    @property
    def stage(self) -> int:
        """The stage of ZeRO."""
        return self.partition.stage

    @property
    def of_ranks(self) -> bool:
        """Whether each rank has an entry of its own of every leaf; see `rank_entries`."""
        return any(axis.name == RANKS for axis in self.mesh.axes)

    @property
    def axis(self) -> str:
        """The name of the ranks that units are cut over."""
        return self.layout.axis

    def within(self, unit: Unit) -> Axis:
        """Return the ranks that a unit is cut over first, and along which it is gathered before each use."""
        return self.partition.first(unit.of_experts)

    def axis_of(self, unit: Unit) -> Axis:
        """Return the ranks that a unit is cut over, in the order of its shards. A transfer may not go over all of them
        at once: see `steps`.
        """
        return self.partition.over(unit.of_experts)

    def steps(self, unit: Unit, from_copy: bool = False) -> tuple[Axis, ...]:
        """Return the axes along which shards become the whole unit, one after the other. `from_copy`: those along which
        the copy does, which is gathered along `copied_over`.
        """
        axes = () if self.num_shards(unit) == 1 else self.partition.axes(unit.of_experts)
        copied = self.partition.copied_over(unit.of_experts) if from_copy else None
        return tuple(axis for axis in axes if axis != copied)

    def copied_over(self, unit: Unit) -> Axis | None:
        """Return the axis along which shards become the copy that parameters hold beside them; None if they hold none,
        or nothing of the unit. See `Partition`.
        """
        return self.partition.copied_over(unit.of_experts) if unit.size else None

    def gathers_as(self, unit: Unit, stored: torch.dtype, axis: Axis) -> str:
        """Return the codec by which a unit stored as `stored` is gathered along an axis, and rounded at stage 0; "" for
        none.
        """
        if unit.num_shards == 1:
            return ""
        rule = self._float8(stored)
        if rule is not None:
            return _float8_codec(unit, rule, block_in(self._part(unit, axis), BLOCK))
        return self._codec(unit, self.precision.computes(stored), axis, "gather")

    def _float8(self, stored: torch.dtype) -> Fp8 | None:
        """Return the rule by which weights are gathered in float8; None for none."""
        rule = self.precision.fp8
        gathers = rule is not None and rule.gather and self.precision.computes(stored) is torch.bfloat16
        return rule if gathers else None

    def rounded_as(self, unit: Unit, stored: torch.dtype) -> str | None:
        """Return the codec by which a unit is rounded that is on every rank already; None for none. It is "" where none
        of this rank's slices of the unit is coded, and perhaps some of others': all ranks compute the same.
        """
        axis = self.within(unit)
        codec, wire = self.gathers_as(unit, stored, axis), self.precision.wire_along(axis)
        in_blocks = wire is not None and wire.gathers_in_blocks(self.precision.computes(stored))
        elsewhere = self.mesh.slices and unit.num_shards > 1 and (in_blocks or self._float8(stored) is not None)
        return codec if codec or elsewhere else None

    def reduces_as(self, unit: Unit, dtype: torch.dtype, axis: Axis) -> str:
        """Return the codec by which a unit's gradient in a dtype is reduced along an axis; "" for none."""
        return self._codec(unit, dtype, axis, "reduce")

    def feeds_back(self, unit: Unit, dtype: torch.dtype, axis: Axis) -> bool:
        """Return whether what codes leave out of a unit's gradient along an axis is sent later. All ranks agree, also
        one none of whose slices is coded.
        """
        wire = self.precision.wire_along(axis)
        if wire is None or not wire.feedback or axis.size == 1 or dtype not in CODED:
            return False
        return bool(self.reduces_as(unit, torch.float32, axis) or self.mesh.slices)

    def _codec(self, unit: Unit, dtype: torch.dtype, axis: Axis, what: str) -> str:
        wire = self.precision.wire_along(axis)
        return "" if wire is None else wire.codec(unit, dtype, what, self._part(unit, axis))

    def _part(self, unit: Unit, axis: Axis) -> int:
        """Return the number of elements of one rank's part of what is sent of a unit along an axis."""
        within = self.within(unit)
        return unit.size // within.size // (1 if axis == within else self.mesh.replicas.size)

    def start_of(self, unit: Unit, axis: Axis) -> int:
        """Return the element of a unit at which the part begins that is sent along an axis: the ranks of `within` send
        all of it, and replicas of one of these ranks its part.
        """
        within = self.within(unit)
        return 0 if axis == within else within.rank * (unit.size // within.size)

    def rounds(self, unit: Unit, storage: StorageSpec) -> bool:
        """Return whether the copy that parameters hold of a unit has other numbers than its shards: what arrives."""
        axis = self.copied_over(unit)
        return axis is not None and bool(self.gathers_as(unit, storage.dtype, axis))

    def lies_in_copy(self, unit: Unit, storage: StorageSpec) -> bool:
        """Return whether a shard is a view of the copy; not of one that is rounded."""
        return storage.lies_in(self.precision.computes(storage.dtype)) and not self.rounds(unit, storage)

    @property
    def has_copies(self) -> bool:
        """Whether parameters hold such a copy."""
        return any(self.copied_over(unit) for unit in self.layout.units)

    @property
    def rows(self) -> tuple[Axis, ...]:
        """The axes along which ranks have other shards of the same slices, the one that is cut last first."""
        return self.partition.axes(experts=True)

    def counts(self, leaf: Leaf) -> bool:
        """Return whether this rank's elements of a leaf are to be counted: no rank before it has the same slice."""
        return counts(leaf.cuts, self.slices_of(leaf.of_experts))

    def slices_of(self, experts: bool) -> tuple[Axis, ...]:
        """Return the axes along which ranks have slices of units of experts, or of others: those are in shards along
        `expert`.
        """
        return tuple(axis for axis in self.mesh.slices if experts or not axis.kind.experts)

    def stored_shards(self, unit: Unit) -> list[StoredShard]:
        """Return the shards of a unit that this rank stores: its own, or all at stage 0."""
        if self.num_shards(unit) > 1:
            return [StoredShard(*self.own_cut(unit), 0, True)]
        numbers = range(unit.num_shards) if unit.of_experts else self.mesh.shards_by_row
        rows = {number: row for row, number in enumerate(numbers)}
        return [StoredShard(*self.layout.cut(unit, k), rows.get(k, 0), k in rows) for k in range(unit.num_shards)]

    def stored_runs(self) -> Iterator[StoredRun]:
        """Yield the elements that this rank stores, leaf by leaf."""
        for k, unit in enumerate(self.layout.units):
            begin = self.bounds(unit)[0]
            for start, stop, row, mine in self.stored_shards(unit):
                for leaf, a, b in unit.intervals(start, stop):
                    at, first = start - begin, start + a - leaf.offset
                    yield StoredRun(k, at + a, at + b, leaf, first, row, mine and self.counts(leaf))

    def num_shards(self, unit: Unit) -> int:
        """Return the number of parts that a unit is stored in: 1 at stage 0."""
        return unit.num_shards if self.partition.shard_over else 1

    @property
    def is_whole(self) -> bool:
        """Whether every rank stores all of its units."""
        return all(self.num_shards(unit) == 1 for unit in self.layout.units)

    def bounds(self, unit: Unit) -> tuple[int, int]:
        """Return [start, stop) of this rank's stored part of `unit`, in elements."""
        if self.num_shards(unit) == 1:
            return 0, unit.size
        return self.layout.cut(unit, self.axis_of(unit).rank)

    def own_cut(self, unit: Unit) -> tuple[int, int]:
        """Return [start, stop) of this rank's shard of `unit`, which at stage 0 is a part of what it stores."""
        return self.layout.cut(unit, self.axis_of(unit).rank)

    def in_copy(self, unit: Unit) -> tuple[int, int, int]:
        """Return (start, stop, size): where this rank's shard is in the copy, and the elements of the copy."""
        axis, size = self.copied_over(unit), unit.size // unit.num_shards
        rank, num = (0, 1) if axis is None else (axis.rank, axis.size)
        return rank * size, (rank + 1) * size, num * size

    def check_axis(self, axis: str | Axis | None, what: str) -> None:
        """Raise `ValueError` unless `axis` is the one that this layout was cut over, or None."""
        name = axis.name if isinstance(axis, Axis) else axis
        if name not in (None, self.axis):
            raise ValueError(
                f"{what}: the tree is sharded over {self.axis!r}, not over {name!r}. Write axis={self.axis!r}, or "
                "leave axis out."
            )

    @cached_property
    def signature(self) -> int:
        """A number that two specs share if a step captured with one may run with the other on this rank."""
        axes = tuple((x.name, x.size, x.rank, x.group) for x in self.mesh.axes)
        key = (self.layout, self.layout.treedef, self.stage, self.precision, axes)
        return _signatures.setdefault(key, len(_signatures))

    @cached_property
    def trainable(self) -> Spec:
        """The spec without frozen units."""
        return replace(self, layout=restrict(self.layout, lambda unit, _: unit.trainable))
