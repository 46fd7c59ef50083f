"""The buffers of a `Sharded`: how they are allocated, and how replicas are made equal."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from .agreement import group_named
from .collectives import ops
from .mesh import Axis
from .sharding import Sharded, Spec
from .stored import PLAIN, SPLIT, Kind, Stored
from .transport import wait_for_all


def allocate(spec: Spec, device: torch.device, cached: bool,
             kinds: Sequence[Kind] | None = None) -> Sharded:
    """A `Sharded` of zeros. `cached`: with the gathered copy, of which pieces are views where dtypes agree.

    `kinds`: how pieces are kept, by unit; as they are, in the layout's dtypes, by default.
    """
    if cached:
        wait_for_all()  # for the copies of states that were dropped, among others: nobody else will
    pieces: list[Stored] = []
    full: list[Tensor] = []
    for unit, kind in zip(spec.layout.units, kinds or [Kind(PLAIN, u.dtype) for u in spec.layout.units], strict=True):
        a, b = spec.bounds(unit)
        parts: list[Tensor] = []
        if cached:
            full.append(torch.zeros(unit.size, dtype=spec.precision.computes(kind.dtype), device=device))
        if cached and kind.lies_in(full[-1].dtype):
            parts.append(full[-1][a:b])
        for dtype, size in kind.codec.parts(kind.dtype, b - a)[len(parts) :]:
            parts.append(torch.zeros(size, dtype=dtype, device=device))
        pieces.append(Stored(kind, tuple(parts)))
    return Sharded(spec, pieces, full if cached else None)


def equalize(values: Sequence[Tensor], axis: Axis) -> None:
    """Write the first rank's values into replicated tensors on every rank, in one broadcast. All ranks call it."""
    values = [x for x in values if x.numel()]
    if axis.size == 1 or not values:
        return
    # A group may know accelerators alone: where there is one, everything goes that way.
    device = next((x.device for x in values if x.device.type != "cpu"), values[0].device)
    flat = torch.cat([x.contiguous().view(-1).view(torch.uint8).to(device) for x in values])
    dist.broadcast(flat, group=group_named(axis.group), group_src=0)
    for x, part in zip(values, flat.split([x.numel() * x.element_size() for x in values]), strict=True):
        x.copy_(part.to(x.device).clone().view(x.dtype).view(x.shape))


def lacks_copy(sharded: Sharded) -> bool:
    """Whether parameters so laid out have a gathered copy, and this one has lost it."""
    return sharded.copies is None and sharded.spec.stage in (1, 2) and sharded.spec.axis.size > 1


def refill(sharded: Sharded) -> None:
    """Gather the copy that stages 1 and 2 keep beside parameters, anew, where an unflatten dropped it.

    The pieces become views of it where dtypes agree, so nothing is held twice. All ranks call it.
    """
    made = allocate(sharded.spec, sharded.stored[0].device, True, [x.kind for x in sharded.stored])
    with torch.no_grad():
        for mine, piece in zip(made.stored, sharded.stored, strict=True):
            for new, old in zip(mine.parts, piece.parts, strict=True):
                new.copy_(old)
    settle(made)
    sharded.move(made.stored, made.full)


def keep_halves(sharded: Sharded) -> None:
    """Keep parameters as split masters where their precision asks for it and an unflatten has joined them."""
    def joined(x: Stored) -> bool:
        return x.kind.codec == PLAIN and sharded.spec.precision.splits(x.dtype)

    if sharded.spec.halves and any(map(joined, sharded.stored)):
        sharded.move([Kind(SPLIT, x.dtype).keep(x.decode()) if joined(x) else x for x in sharded.stored], None)


def settle(sharded: Sharded) -> None:
    """Make replicas equal: every rank's own piece counts, whatever others have there. All ranks call it."""
    spec = sharded.spec
    if spec.axis.size == 1 or (spec.stage != 0 and sharded.full is None):
        return
    for i, unit in enumerate(spec.layout.units):
        piece = sharded.stored[i]
        a, b = spec.layout.cut(unit, spec.axis.rank)
        if sharded.full is not None and not piece.kind.lies_in(sharded.full[i].dtype):
            sharded.full[i][a:b].copy_(spec.precision.narrow(piece.decode()))
        for whole in piece.parts if sharded.full is None else [sharded.full[i]]:
            ops.refresh_(whole, spec.axis.rank, spec.axis.size, spec.axis.group, unit.name)
            ops.wait(whole)
