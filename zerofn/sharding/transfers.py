"""What is sent of a tree that is cut, each in one function: a unit is gathered, its gradient is reduced, a leaf is put
together from the slices of ranks, and what several ranks hold is taken from the first of them.

They consist of the operations of `comm.transport`, so they run eagerly and are captured alike.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ..collectives.maps import AllGather, ReduceScatter, begins_at
from ..collectives.over_ranks import ops, rows_over
from ..collectives.stages import OnStage
from ..comm.mesh import Axis, Mesh
from ..comm.transport import group_for
from ..comm.wire import codec_named
from ..geometry.cuts import Cut, stage_cut
from ..geometry.layout import Unit, unravel
from .spec import Spec


def gather_unit(
    spec: Spec, unit: Unit, x: Tensor, stored: torch.dtype | None = None, *, from_copy: bool = False
) -> Tensor:
    """Return the whole unit, flat: [..., shard] on each rank -> [..., unit.size].

    `stored`: of a unit of parameters, the dtype of its shards, which decides the form that is sent (`comm.wire`);
    None sends it as it is. What is on every rank already is rounded as if it was sent. `from_copy`: `x` is what
    parameters hold beside their shards: the unit, or a part of it, rounded already.
    """
    steps = spec.steps(unit, from_copy)
    for axis in steps:
        codec = "" if stored is None else spec.gathers_as(unit, stored, axis)
        x = _by_row(AllGather(axis, unit.name, codec=codec, start=spec.start_of(unit, axis)), x)
    if steps or from_copy:
        return x if steps else x.view_as(x)
    form = None if stored is None else spec.rounded_as(unit, stored)
    return ops.as_whole(x if form is None else ops.rounded(x, form))


def _by_row(op: AllGather | ReduceScatter, x: Tensor) -> Tensor:
    """Run a map; in blocks of codes, which do not go over several rows, on each row of [..., n] alone."""
    if x.dim() == 1 or not op.codec or not codec_named(op.codec).beside:
        return op(x)[0]
    return torch.stack([op(row)[0] for row in x.reshape(-1, x.shape[-1])]).view(*x.shape[:-1], -1)


def _call(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return op(*args, **kwargs)


def gather_in_place(
    whole: Any, axis: Axis, unit: Unit, *, codec: str = "", start: int = 0, call: Callable[..., Any] = _call
) -> None:
    """Start an all-gather over the ranks of an axis into `whole` [size * s], in which each has its own part already:
    the whole unit, or a part of it that parameters hold as a copy. `codec`, `start`: in which form it is sent, and the
    element of the unit at which it begins. `call`: what runs an operation, or writes it down.
    """
    to = (axis.rank, axis.size, axis.group, unit.name, *([codec] if codec else []))
    call(ops.all_gather_into_.default, (whole, *to), begins_at(codec, start))


def refresh_copy(spec: Spec, unit: Unit, whole: Any, stored: torch.dtype, *, call: Callable[..., Any] = _call) -> None:
    """Start the all-gather of the copy that parameters hold of a unit, in which each rank has its shard already.
    `stored`: of the shards.
    """
    axis = spec.copied_over(unit)
    if axis is not None:
        codec, start = spec.gathers_as(unit, stored, axis), spec.start_of(unit, axis)
        gather_in_place(whole, axis, unit, codec=codec, start=start, call=call)


def reduce_unit(spec: Spec, unit: Unit, flat: Tensor) -> Tensor:
    """flat [..., size] on each rank -> this rank's stored part of the sum over ranks, added in rank order."""
    return stored_sum(spec, unit, own_sum(spec, unit, flat))


class Drawn(NamedTuple):
    """What draws a unit's codes where they are not the nearest. `key`: of this rank, and the step. `unit`: its number
    among those that the key is for.
    """

    key: Tensor
    unit: int


def own_sum(spec: Spec, unit: Unit, flat: Tensor, drawn: Drawn | None = None) -> Tensor:
    """flat [..., size] on each rank -> the part of the sum over ranks that this one adds, in rank order: its shard, or
    less of it. Sums of such parts may be added before `stored_sum` makes what is stored of them. `drawn`: for axes
    along which codes are; without it they are the nearest.
    """
    part = _along_shards(spec, unit, flat, drawn)
    if spec.mesh.replicas.size > 1:  # an all-reduce, in two steps that are started apart
        part = _along(spec, unit, part, spec.mesh.replicas, drawn=drawn)
    return part


def fed_back(spec: Spec, unit: Unit, flat: Tensor, error: Tensor, *, by: Tensor | None) -> tuple[Tensor, Tensor]:
    """flat, error [size] on each rank -> (what `own_sum` returns of flat + error * by, what codes leave out of that,
    over `by`). `by`: what the sum is divided by later, None for 1. Where codes are not fed back the error stays.

    Sums that are coded once more along `replicate` leave out something of this rank's part of the unit. It is kept in
    the same place, since whatever a rank sends later is added to the same sum.
    """
    axis, replicas = spec.within(unit), spec.mesh.replicas
    first, second = (spec.feeds_back(unit, flat.dtype, x) for x in (axis, replicas))
    if not first and not second:
        return own_sum(spec, unit, flat), error
    sent = flat.to(error.dtype) + (error if by is None else error * by)
    part = _along_shards(spec, unit, sent, None)
    left = _lost(spec, unit, sent, axis) if first else torch.zeros_like(sent)
    if replicas.size > 1:
        if second:  # what codes of its part leave out, this rank sends as its own the next time
            left = ops.add_part(left, _lost(spec, unit, part, replicas), spec.start_of(unit, replicas))
        part = _along(spec, unit, part, replicas, drawn=None)
    return part.to(flat.dtype), left if by is None else left / by


def _lost(spec: Spec, unit: Unit, x: Tensor, axis: Axis) -> Tensor:
    """Return what codes leave out of what is sent along an axis."""
    return x - ops.rounded(x, spec.reduces_as(unit, x.dtype, axis), spec.start_of(unit, axis))


def _along_shards(spec: Spec, unit: Unit, flat: Tensor, drawn: Drawn | None) -> Tensor:
    """Return the part of the sum over the ranks that a unit is cut over first."""
    axis = spec.within(unit)
    return _along(spec, unit, flat, axis, drawn=drawn) if axis.size > 1 else ops.as_shard(flat, axis.name)


def _along(spec: Spec, unit: Unit, x: Tensor, axis: Axis, *, drawn: Drawn | None) -> Tensor:
    """x [..., size * s] -> [..., s]: this rank's part of the sum over an axis."""
    codec, start = spec.reduces_as(unit, x.dtype, axis), spec.start_of(unit, axis)
    op = ReduceScatter(axis, unit.name, codec=codec, start=start)
    if drawn is not None and spec.precision.draws_along(axis):
        op = replace(op, key=drawn.key, number=2 * drawn.unit + (axis != spec.within(unit)))
    return _by_row(op, x)


def stored_sum(spec: Spec, unit: Unit, part: Tensor) -> Tensor:
    """What each rank has added of a unit's gradient -> this rank's stored part of it."""
    axis, replicas = spec.within(unit), spec.partition.shared_over
    if replicas is not None:
        part = ops.as_shard(AllGather(replicas, unit.name)(part)[0])
    # Stage 0 uses the same steps, so that its sums have the bits of every other stage.
    if axis.size > 1 and spec.num_shards(unit) == 1:
        part = ops.as_shard(AllGather(axis, unit.name)(part)[0])
    return part


def whole_leaves(spec: Spec, unit: Unit, x: Tensor, *, across_stages: bool = True) -> list[Tensor]:
    """Return the whole leaves of a unit: [shard] on each rank -> [*leaf.whole] each, in one all-gather along each axis.
    Those that ranks have no slices of are views of the gathered unit. All ranks must call it.

    `across_stages`: also those that lie on other stages of a pipeline; else these have no elements.
    """
    leaves = list(unravel(gather_unit(spec, unit, x), unit))
    cuts = [leaf.cuts if across_stages else _here(leaf.cuts, spec.mesh) for leaf in unit.leaves]
    return assembled(leaves, cuts, spec.mesh)


def _here(cuts: Sequence[Cut], mesh: Mesh) -> Sequence[Cut]:
    """Return the cuts of a leaf within its stage: none on other stages, where it has nothing."""
    stages = stage_cut(cuts)
    there = stages is None or mesh.axis(stages.axis).rank in stages.holders
    return [cut for cut in cuts if cut is not stages] if there else ()


def assembled(slices: Sequence[Tensor], cuts: Sequence[Sequence[Cut]], mesh: Mesh) -> list[Tensor]:
    """Return the whole leaves that this rank's `slices` are of, in one all-gather along each axis of their cuts, and
    one broadcast of each leaf that lies on stages.

    A leaf without cuts is returned as it is. All ranks of the axes must call it.
    """
    out = [from_stage(x, each, mesh) for x, each in zip(slices, cuts, strict=True)]
    for axis in mesh.axes:
        found = [(k, cut) for k, each in enumerate(cuts) for cut in each if cut.axis == axis.name]
        if found and not axis.kind.stages:
            _assemble(out, found, axis)
    return out


def on_stage(cuts: Sequence[Cut], shape: Sequence[int], mesh: Mesh, leaf: str = "") -> OnStage | None:
    """Return the map that brings a leaf to all stages of a pipeline; None for one that is there. `shape`: of the leaf
    here, which may lack the elements of another stage.
    """
    cut = stage_cut(cuts)
    if cut is None or mesh.size(cut.axis) == 1:
        return None
    others = [x for x in cuts if x is not cut and x.dim == cut.dim]
    size = min([cut.size, *(x.length(mesh.axis(x.axis).rank) for x in others)])
    return OnStage(mesh.axis(cut.axis), cut.holders, cut.dim - len(shape), size, leaf)


def from_stage(x: Tensor, cuts: Sequence[Cut], mesh: Mesh) -> Tensor:
    """Return what all ranks of a pipeline have, of a leaf that lies on some of them. All of them must call it."""
    found = on_stage(cuts, x.shape, mesh)
    return x if found is None else found(x)[0]


def _assemble(out: list[Tensor], cuts: Sequence[tuple[int, Cut]], axis: Axis) -> None:
    """Put the leaves together that are cut along an axis. `cuts`: which of `out`, and how."""
    flats, shapes = [], []
    for k, cut in cuts:
        rows = out[k].movedim(cut.dim, 0)
        longest = max(map(cut.length, range(axis.size)))
        shapes.append((longest, *rows.shape[1:]))
        flats.append(torch.nn.functional.pad(rows.reshape(-1), (0, (longest - len(rows)) * math.prod(rows.shape[1:]))))
    gathered, start = rows_over(torch.cat(flats) if len(flats) > 1 else flats[0], axis), 0
    for (k, cut), shape in zip(cuts, shapes, strict=True):
        stop = start + math.prod(shape)
        rows, places = gathered[:, start:stop].view(axis.size, *shape), []
        for rank in sorted({cut.first(r) for r in range(axis.size)}):
            at = 0
            for a, b in cut.slices[rank]:
                places.append((a, b, rows[rank, at : at + b - a]))
                at += b - a
        pieces = [x for a, b, x in sorted(places, key=lambda place: place[:2]) if a < b]
        out[k], start = torch.cat(pieces).movedim(0, cut.dim).contiguous(), stop


def of_first(x: Tensor, cuts: Iterable[Cut], mesh: Mesh) -> Tensor:
    """Return a slice with the values of the first rank that has the same one. All ranks must call it."""
    by_axis = {cut.axis: cut for cut in cuts}
    stages = on_stage(list(by_axis.values()), x.shape, mesh)
    if stages is not None and len(stages.holders) > 1:
        whole = replace(stages, holders=stages.holders[:1])(x)[0]
        x = whole if x.numel() else x
    for axis in mesh.slices:
        if stages is None or axis.name != stages.axis.name and x.numel():
            x = _of_first(x, by_axis.get(axis.name), axis)
    return x


def _of_first(x: Tensor, cut: Cut | None, axis: Axis) -> Tensor:
    owners = [0 if cut is None else cut.first(rank) for rank in range(axis.size)]
    if len(set(owners)) == axis.size:
        return x
    group, mine = group_for(axis.group, x), x
    for rank in sorted(set(owners)):
        shape = [cut.length(rank) if cut and d == cut.dim else n for d, n in enumerate(x.shape)]
        there = x.contiguous().clone() if axis.rank == rank else x.new_empty(shape)
        if there.numel():
            dist.broadcast(there.view(-1).view(torch.uint8), group=group, group_src=rank)
        mine = there if owners[axis.rank] == rank else mine
    return mine


def equalize(values: Sequence[Tensor], axis: Axis) -> None:
    """Write the first rank's values into replicated tensors on every rank, in one broadcast. All ranks must call it."""
    values = [x for x in values if x.numel()]
    if axis.size == 1 or not values:
        return
    device = next((x.device for x in values if x.device.type != "cpu"), values[0].device)
    flat = torch.cat([x.contiguous().view(-1).view(torch.uint8).to(device) for x in values])
    dist.broadcast(flat, group=group_for(axis.group, flat), group_src=0)
    for x, part in zip(values, flat.split([x.numel() * x.element_size() for x in values]), strict=True):
        x.copy_(part.to(x.device).clone().view(x.dtype).view(x.shape))
