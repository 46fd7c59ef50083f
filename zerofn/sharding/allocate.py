"""Allocate the buffers of a `Sharded`, and make replicas equal."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from ..collectives.maps import ops
from ..job.in_flight import pending
from ..memory.host_allocator import zeros
from ..offload.disk import Store, pages, scratch_space
from ..offload.drive_tensor import DriveTensor, handle_of
from ..offload.host_tensor import HostTensor, on_host
from ..ops.codecs import PLAIN, SPLIT
from .sharded import Sharded
from .spec import Spec
from .storage import StorageSpec, Stored, StoredPart
from .transfers import equalize, gather_in_place, refresh_copy

HELD = 2  # units that may be partly filled in memory before they are written to a drive


def allocate(
    spec: Spec,
    storages: Sequence[StorageSpec],
    device: torch.device,
    *,
    cached: bool,
    scratch: Store | None = None,
    name: str = "",
) -> Sharded:
    """Return a `Sharded` of zeros.

    `storages`: of each unit's shard. `cached`: allocate the gathered copy, too; shards are views of it if it has the
    same numbers. `scratch`: the store for parts on drives. Errors call them `name`.
    """
    if cached:
        pending().wait_for_all()  # for the copies of states that were dropped, among others: nobody else will
    shards: list[Stored] = []
    full: list[Tensor] = []
    for unit, storage in zip(spec.layout.units, storages, strict=True):
        a, b = spec.bounds(unit)
        parts: list[StoredPart] = []
        if cached:
            start, stop, size = spec.in_copy(unit)
            full.append(zeros(size, spec.precision.computes(storage.dtype), device))
            if spec.lies_in_copy(unit, storage):
                parts.append(full[-1][start:stop])
        for k, (dtype, size, tier) in list(enumerate(storage.parts(b - a)))[len(parts) :]:
            if tier == "cpu":
                parts.append(HostTensor(on_host(size, dtype, device), device))
            elif tier == "nvme" and scratch is not None:
                region = scratch.allocate(
                    size * dtype.itemsize, f"{name}[{unit.name!r}]{storage.codec.parts[k].suffix}"
                )
                parts.append(DriveTensor(handle_of(region), dtype, size, device))
            else:
                parts.append(zeros(size, dtype, device))
        shards.append(Stored(storage, tuple(parts)))
    return Sharded(spec, shards, full if cached else None)


def scratch_for(parts: Iterable[tuple[Spec, Sequence[StorageSpec]]]) -> Store | None:
    """Return a store for the parts that go to drives, None if there are none. Raises `disk.DiskError`."""
    parts = list(parts)
    nbytes = sum(
        pages(size * dtype.itemsize)
        for spec, storages in parts
        for unit, storage in zip(spec.layout.units, storages, strict=True)
        for dtype, size, tier in storage.parts(spec.bounds(unit)[1] - spec.bounds(unit)[0])
        if tier == "nvme"
    )
    paths = next(
        (
            storage.placement.paths
            for _, storages in parts
            for storage in storages
            if storage.placement and storage.placement.paths
        ),
        (),
    )
    return scratch_space(paths, nbytes) if nbytes else None


class Filler:
    """Fill a new `Sharded` leaf by leaf.

    A unit on a drive is held in memory until it is complete, or until too many are. Leaves come in the order in
    which they can be made, and constants can all be made at once.
    """

    def __init__(self, sharded: Sharded) -> None:
        self._shards = sharded.stored
        bounds = [sharded.spec.bounds(unit) for unit in sharded.layout.units]
        self._left = [len(list(u.intervals(*b))) for u, b in zip(sharded.layout.units, bounds, strict=True)]
        self._held: dict[int, Stored] = {}

    def write(self, index: int, start: int, values: Tensor) -> None:
        """Write all of a leaf that this rank stores in the index-th shard."""
        if index not in self._held:
            if len(self._held) == HELD:
                first = next(iter(self._held))
                self._shards[first].save(self._held.pop(first))
            self._held[index] = self._shards[index].loaded()
        self._held[index].write(start, values)
        self._left[index] -= 1
        if not self._left[index]:
            self._shards[index].save(self._held.pop(index))


def _take_first_replica(sharded: Sharded) -> None:
    """Give every shard the values that it has on the first of the ranks that share it."""
    replicas = sharded.spec.partition.shared_over
    if replicas is None:
        return
    for shard in sharded.stored:
        held = shard.loaded()
        equalize(held.tensors, replicas)
        shard.save(held)


def lacks_copy(sharded: Sharded) -> bool:
    """Return whether parameters of this layout should have a gathered copy and have lost it."""
    return sharded.copies is None and sharded.spec.has_copies


def refill(sharded: Sharded) -> None:
    """Gather the copy that parameters hold beside their shards again, if an unflatten has dropped it.

    The shards become views of it if it has the same numbers, so nothing is held twice. All ranks must call it.
    """
    pending().wait_for_all()
    spec, shards, full = sharded.spec, [], []
    for unit, x in zip(spec.layout.units, sharded.stored, strict=True):
        start, stop, size = spec.in_copy(unit)
        full.append(zeros(size, spec.precision.computes(x.dtype), x.device))
        if spec.lies_in_copy(unit, x.storage):
            part = full[-1][start:stop].copy_(x.tensors[0].detach())
            x = Stored(x.storage, (part, *x.parts[1:]))
        shards.append(x)
    settle(Sharded(spec, shards, full))
    sharded.move(shards, full)


def keep_halves(sharded: Sharded) -> None:
    """Store parameters as split masters again, if their partition asks for that and an unflatten has joined them."""

    def joined(storage: StorageSpec) -> bool:
        return storage.codec == PLAIN and storage.dtype is SPLIT.holds

    if sharded.spec.partition.codec == SPLIT and any(map(joined, sharded.storages)):
        sharded.move(
            [StorageSpec(SPLIT, x.dtype).keep(x.decode()) if joined(x.storage) else x for x in sharded.stored], None
        )


def settle(sharded: Sharded) -> None:
    """Make replicas equal: each shard takes the values of the rank that owns it. All ranks must call it."""
    spec, full = sharded.spec, sharded.full
    _take_first_replica(sharded)
    for i, (unit, shard) in enumerate(zip(spec.layout.units, sharded.stored, strict=True)):
        if full is not None:
            start, stop, _ = spec.in_copy(unit)
            if not spec.lies_in_copy(unit, shard.storage):
                full[i][start:stop].copy_(spec.precision.narrow(shard.load_and_decode()))
            refresh_copy(spec, unit, full[i], shard.dtype)
            ops.wait(full[i])
        elif not spec.partition.shard_over and spec.within(unit).size > 1:
            held = shard.loaded()
            for whole in held.tensors:
                gather_in_place(whole, spec.within(unit), unit)
                ops.wait(whole)
            shard.save(held)
