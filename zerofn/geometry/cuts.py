"""How a leaf is cut over an axis of ranks, before its unit is cut into shards: each rank has a slice of it.

A slice is some intervals of one dim: one for a plain slice, several where a leaf holds several matrices one after the
other. Slices may be of several sizes, and several ranks may have the same one.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import cast

import torch
from torch import Tensor

from ..comm.axes import PIPE, kind_of
from ..comm.mesh import Axis, Mesh
from ..schedules import NAMES, Costs, Placement, Schedule, best, make, usual_limit
from ..schedules.named import ScheduleName
from ..schedules.own import AUTO

Intervals = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Cut:
    """The slices of a leaf along one dim, for the ranks of one axis.

    `size`: of the whole leaf's dim. `slices`: for each rank of the axis, the intervals [start, stop) that it has, in
    the order in which its slice has them; () where it has nothing of the leaf.

    >>> equal("tensor", 0, 6, 2).slices
    (((0, 3),), ((3, 6),))
    """

    axis: str
    dim: int
    size: int
    slices: tuple[Intervals, ...]

    def length(self, rank: int) -> int:
        """Return the size of a rank's slice."""
        return sum(b - a for a, b in self.slices[rank])

    def first(self, rank: int) -> int:
        """Return the first rank of the axis with the same slice."""
        return self.slices.index(self.slices[rank])

    @property
    def holders(self) -> tuple[int, ...]:
        """The ranks of the axis that have something of the leaf: of a leaf that lies on stages, all of it."""
        return tuple(rank for rank in range(len(self.slices)) if self.length(rank))


def equal(axis: str, dim: int, size: int, num: int, parts: int = 1, unit: int = 1) -> Cut:
    """Return the cut of a dim into `num` slices, as equal as whole multiples of `unit` allow: the last are shorter.

    `parts`: how many matrices of one size the leaf holds along the dim; each is cut. Where there are fewer units than
    ranks, several ranks in a row have the same slice. Raises `ValueError` for a size of 0, for one that units and parts
    do not divide, and for fewer units than ranks where they do not divide these.
    """
    if not size:
        raise ValueError(f"dim {dim} has size 0. Leave it whole")
    whole, rest = divmod(size, parts * unit)
    if rest:
        raise ValueError(f"the size of dim {dim}, {size}, is not a multiple of {parts * unit}")
    if whole < num:
        if num % whole:
            raise ValueError(f"dim {dim} has only {whole} {'heads' if unit > 1 else 'entries'} for {num} ranks")
        bounds = [(k * whole // num, k * whole // num + 1) for k in range(num)]
    else:
        each = -(-whole // num)
        bounds = [(min(k * each, whole), min((k + 1) * each, whole)) for k in range(num)]
    one = size // parts
    return Cut(
        axis, dim, size, tuple(tuple((p * one + a * unit, p * one + b * unit) for p in range(parts)) for a, b in bounds)
    )


@dataclass(frozen=True)
class Pipeline:
    """The stages of a model, and the schedule by which they run if a step says no other: a name, "auto" for the fastest
    that is found for the `costs` of the stages, in no more memory than the named one that needs the least; or a user's
    own.
    """

    placement: Placement
    schedule: str | Schedule
    costs: Costs | None = None

    @property
    def schedule_in_words(self) -> str:
        """The schedule's name; of one's own, with a number that differs for another one."""
        own = self.schedule
        return repr(own) if isinstance(own, str) else f"{own.name!r} ({zlib.crc32(own.to_csv().encode()):08x})"

    def by(self, schedule: str | Schedule) -> Pipeline:
        """Return the same stages with another schedule. Raises `ValueError` for one of another placement."""
        has = self.placement
        if isinstance(schedule, Schedule):
            if [*map(schedule.placement.stages_of, range(schedule.ranks))] != [*map(has.stages_of, range(has.ranks))]:
                raise ValueError(
                    f"compile: the schedule is for {schedule.placement}, but the cuts are for {has}. Pass the same "
                    "schedule to cuts=zerofn.parallel.pipe(model, mesh, loss_fn, batch, schedule=...)."
                )
            return replace(self, schedule=schedule)
        row = NAMES.get(schedule)
        if row is not None and (row.style != has.style or has.chunks != row.chunks and not row.any_chunks):
            raise ValueError(
                f"compile: schedule={schedule!r} is for {row.placement(has.ranks, row.chunks)}, but the cuts are for "
                f"{has}. Write cuts=zerofn.parallel.pipe(model, mesh, loss_fn, batch, schedule={schedule!r})."
            )
        if schedule == AUTO and self.costs is None:
            raise ValueError(
                "compile: schedule='auto' needs the costs of stages. Write cuts=zerofn.parallel.pipe(model, mesh, "
                "loss_fn, batch)."
            )
        return replace(self, schedule=schedule)

    def of(self, microbatches: int) -> Schedule:
        """Return the schedule for that many microbatches. Raises `ValueError` if the user's own has another number."""
        if isinstance(self.schedule, Schedule):
            if self.schedule.microbatches != microbatches:
                raise ValueError(
                    f"compile: the schedule is for {self.schedule.microbatches} microbatches, but the step has "
                    f"{microbatches}. Write zerofn.accumulate(vg, {self.schedule.microbatches}), or use a schedule for "
                    f"{microbatches} microbatches."
                )
            return replace(self.schedule, placement=self.placement)
        if self.schedule == AUTO:
            assert self.costs is not None
            costs = {self.placement: self.costs}
            return best(costs, microbatches, usual_limit(costs, microbatches)).schedule
        return make(cast(ScheduleName, self.schedule), self.placement.ranks, microbatches, self.placement.chunks)


@dataclass(frozen=True)
class StageCut(Cut):
    """A leaf that lies whole on some stages of a pipeline, and nowhere else. `dim`: one of the leaf's, of `size`;
    another cut of the same dim says what of it is whole.
    """

    stages: tuple[int, ...] = ()
    pipeline: Pipeline | None = None


def on_stages(pipeline: Pipeline, dim: int, size: int, stages: Iterable[int], axis: str = PIPE) -> StageCut:
    """Return the cut of a leaf that lies on these stages.

    >>> on_stages(Pipeline(Placement("v", 2, 2), "zbv"), 0, 6, [3]).slices
    (((0, 6),), ())
    """
    there = tuple(sorted(stages))
    holders = {pipeline.placement.rank_of(stage) for stage in there}
    slices = tuple(((0, size),) if rank in holders else () for rank in range(pipeline.placement.ranks))
    return StageCut(axis, dim, size, slices, there, pipeline)


def stage_cut(cuts: Iterable[Cut]) -> Cut | None:
    """Return the cut that says on which stages a leaf lies; None for one that lies on all."""
    return next((cut for cut in cuts if kind_of(cut.axis).stages), None)


def stages_of(cuts: Iterable[Cut]) -> tuple[int, ...]:
    """Return the stages on which a leaf with these cuts lies; () for one that lies on all."""
    cut = stage_cut(cuts)
    return (cut.stages if isinstance(cut, StageCut) else cut.holders) if cut else ()


def local_shape(shape: Sequence[int], cuts: Iterable[Cut], mesh: Mesh) -> tuple[int, ...]:
    """Return the shape of this rank's slice of a leaf of `shape`."""
    out = list(shape)
    for cut in cuts:  # of two along one dim, one is of stages: all or nothing
        out[cut.dim] = min(out[cut.dim], cut.length(mesh.axis(cut.axis).rank))
    return tuple(out)


def sliced(x: Tensor, cuts: Iterable[Cut], mesh: Mesh) -> Tensor:
    """Return this rank's slice of a whole leaf: a view where it is one interval, or none."""
    for cut in sorted(cuts, key=lambda cut: kind_of(cut.axis).stages):
        intervals = cut.slices[mesh.axis(cut.axis).rank] or ((0, 0),)
        if kind_of(cut.axis).stages and intervals != ((0, 0),):
            continue
        pieces = [x.narrow(cut.dim, a, b - a) for a, b in intervals]
        x = pieces[0] if len(pieces) == 1 else torch.cat(pieces, cut.dim)
    return x


def counts(cuts: Iterable[Cut], slices: Iterable[Axis]) -> bool:
    """Return whether this rank is the first of those with the same slice of a leaf along the axes `slices`."""
    by_axis = {cut.axis: cut for cut in cuts}
    firsts = ((axis, by_axis[axis.name].first(axis.rank) if axis.name in by_axis else 0) for axis in slices)
    return all(axis.rank == first for axis, first in firsts)
