"""Ranks and named axes: a mesh is a grid of ranks, and an axis one of its directions. One process needs no group."""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ..dry_run.script import current_dry_run
from ..job.environment import launch_of
from ..job.failures import refuse_after_failure
from ..job.rendezvous import fresh, store_at
from ..util.arguments import checked
from ..util.errors import nearest
from ..util.process import the
from .axes import BETWEEN, KINDS, USUAL, AxisKind, kind_of
from .groups import ProcessGroups
from .known_meshes import Meshes

FAKE = "fake machine, "  # begins the name of a group that is only planned for; the names of its axes follow


@dataclass(frozen=True)
class Axis:
    """A named axis of ranks. `rank`: this process's, along the axis. Axes are equal if names and sizes are equal."""

    name: str
    size: int
    rank: int = field(default=0, compare=False)
    group: str = field(default="", compare=False)  # the process group's name; "" without a group

    def __repr__(self) -> str:
        return f"{self.name}={self.rank}/{self.size}"

    @property
    def kind(self) -> AxisKind:
        """The kind of this axis, if it does not stand for several axes."""
        return kind_of(self.name)

    @property
    def names(self) -> tuple[str, ...]:
        """The axes that this axis stands for, those with several ranks."""
        return tuple(self.name.split(BETWEEN))


@dataclass(frozen=True)
class Mesh:
    """A grid of ranks, row-major: the rank number grows fastest along the last axis.

    `Mesh.of(None)` has all ranks of the job along one axis, `data`. `axes`: in order, each with its size and this
    process's rank. `ranks`: the job's rank at each point of the grid; empty if they do not exist (`Mesh.planned`).

    >>> Mesh.of(None).axis("data").size
    1
    """

    axes: tuple[Axis, ...]
    ranks: tuple[int, ...] = field(default=(), compare=False, repr=False)

    def __repr__(self) -> str:
        return f"Mesh({', '.join(f'{x.name}: rank {x.rank} of {x.size}' for x in self.axes)})"

    @staticmethod
    def make(**sizes: int) -> Mesh:
        """Return the grid of all ranks of the job with these axes, in this order. Makes the process group if needed.

        Ranks differ along `pipe` in their stage of the model (`zerofn.parallel.pipe`); along `replicate` in their rows;
        along `data` in rows and shards; along `expert` in rows, experts (`zerofn.moe.cuts`) and shards of other leaves;
        along `context` in tokens of the same rows (`zerofn.parallel.split_sequence`) and shards; along `tensor` in
        slices of layers (`zerofn.parallel.tensor`). Other axes have size 1. One size may be -1, for all other ranks.

        As in `DeviceMesh`, ranks that differ only along the last axis are neighbours. So put the axis that sends most
        last: its ranks are then on one machine.

        Raises `TypeError` for an unknown axis, and `ValueError` for sizes whose product is not the number of ranks.

        >>> Mesh.make(data=-1)
        Mesh(data: rank 0 of 1)
        """
        if (dry_run := current_dry_run()) is not None:
            return Mesh.planned(*dry_run.grid(sizes))
        world = Mesh.of(None).axes[0]
        names, shape = tuple(sizes), resolved(sizes, world.size)
        found: Mesh = the(Meshes).know(_grid(names, shape, range(world.size), world.rank))
        return found

    @staticmethod
    @checked()
    def planned(sizes: Mapping[str, int], num_ranks: int | None = None) -> Mesh:
        """Return the grid of a machine that need not exist, as its rank 0 sees it, for `zerofn.plan`.

        `sizes`, axes: as for `make`. `num_ranks`: needed for a size of -1. Raises the errors of `make`.

        >>> Mesh.planned({"data": 4, "tensor": 2})
        Mesh(data: rank 0 of 4, tensor: rank 0 of 2)
        """
        if num_ranks is None and -1 in sizes.values():
            raise ValueError(f"Mesh.planned: {dict(sizes)} has a size of -1. Write the number of ranks: num_ranks=8.")
        known = math.prod(x for x in sizes.values() if isinstance(x, int)) if num_ranks is None else num_ranks
        shape = resolved(sizes, known, "Mesh.planned")
        return Mesh(tuple(Axis(name, size, 0, _fake(name)) for name, size in zip(sizes, shape, strict=True)))

    @staticmethod
    def of(mesh: Mesh | DeviceMesh | None) -> Mesh:
        """Return a `Mesh` for a `Mesh`, a `DeviceMesh`, or None, which means every rank.

        In a process that a launcher started, makes the process group if there is none yet. Raises `TypeError` for
        anything else, and for a `DeviceMesh` of several axes with other names than ZeroFn's.
        """
        if isinstance(mesh, Mesh):
            return mesh
        if isinstance(mesh, DeviceMesh):
            return _of_device_mesh(mesh)
        if mesh is not None:
            raise TypeError(f"mesh: expected None, a DeviceMesh or a zerofn.Mesh, got {type(mesh).__name__}.")
        join()
        if not dist.is_initialized():
            return Mesh((Axis(USUAL, 1),), (0,))
        world = dist.group.WORLD
        assert world is not None
        size = dist.get_world_size()
        return Mesh((Axis(USUAL, size, dist.get_rank(), world.group_name),), tuple(range(size)))

    @cached_property
    def names_of_groups(self) -> dict[str, frozenset[str]]:
        """The name of each process group of this mesh -> its axes, also those of one rank that belong to it."""
        pairs: list[tuple[Axis, tuple[str, ...]]] = [(axis, (axis.name,)) for axis in self.axes]
        pairs.append((self.all, tuple(axis.name for axis in self.axes)))
        for what in ("batch", "shards", "shards_of_experts", "same_batch"):
            pairs.append((self._over(what), self._having(what)))
        found: dict[str, frozenset[str]] = {}
        for axis, names in pairs:
            if axis.group and axis.size > 1:
                found[axis.group] = found.get(axis.group, frozenset()) | frozenset(names)
        return found

    @property
    def batch_names(self) -> tuple[str, ...]:
        """The axes along which ranks have different parts of the batch."""
        return self._having("batch")

    @checked()
    def axis(self, name: str = USUAL) -> Axis:
        """Return the axis called `name`. The only axis of a mesh also answers to `data`.

        Raises `ValueError` if the mesh does not have it.
        """
        for axis in self.axes:
            if axis.name in self._names([name]):
                return axis
        raise ValueError(f"mesh has no axis {name!r}; its axes are {[a.name for a in self.axes]}.")

    @checked()
    def size(self, name: str) -> int:
        """Return the size of an axis, 1 if the mesh does not have it."""
        return next((axis.size for axis in self.axes if axis.name == name), 1)

    @property
    def num_ranks(self) -> int:
        """The number of ranks of the grid."""
        return math.prod(axis.size for axis in self.axes)

    @cached_property
    def batch(self) -> Axis:
        """The ranks with different parts of the batch, along one axis."""
        return self._over("batch")

    @cached_property
    def rows(self) -> Axis:
        """The ranks with different rows of the batch, along one axis."""
        return self._over("rows")

    @cached_property
    def tokens(self) -> Axis:
        """The ranks with different tokens of the same rows, along one axis."""
        return self._over("tokens")

    @cached_property
    def same_batch(self) -> Axis:
        """The ranks that share the work on the same part of the batch, along one axis."""
        return self._over("same_batch")

    @cached_property
    def shards(self) -> Axis:
        """The ranks that a unit is cut over, along one axis; of a unit of experts, see `shards_of_experts`."""
        return self._over("shards")

    @cached_property
    def shards_of_experts(self) -> Axis:
        """The ranks that a unit of experts is cut over, along one axis: all that have the same experts."""
        return self._over("shards_of_experts")

    @cached_property
    def shards_by_row(self) -> tuple[int, ...]:
        """The number along `shards` of each rank along `shards_of_experts`."""
        found = [axis for axis in self.axes if axis.kind.shards]
        out = []
        for place in itertools.product(*([a.rank] if a.kind.experts else range(a.size) for a in found)):
            k = 0
            for axis, x in zip(found, place, strict=True):
                k = k * axis.size + x
            out.append(k)
        return tuple(out)

    @cached_property
    def replicas(self) -> Axis:
        """The ranks along `replicate`."""
        return self._over("replicas")

    @cached_property
    def stages(self) -> Axis:
        """The ranks along `pipe`."""
        return self._over("stages")

    @cached_property
    def slices(self) -> tuple[Axis, ...]:
        """The axes with a size above 1 along which ranks have different slices of the same leaves."""
        return self._several("slices")

    @cached_property
    def partial(self) -> tuple[Axis, ...]:
        """The axes with a size above 1 along which ranks compute parts of one value, with their slices."""
        return self._several("partial")

    @cached_property
    def all(self) -> Axis:
        """All ranks, along one axis."""
        return self.over(tuple(axis.name for axis in self.axes))

    @checked()
    def over(self, names: Iterable[str]) -> Axis:
        """Return one axis for several, row-major; axes that the mesh does not have count as size 1.

        The first call for several axes makes a process group. So all ranks must make their first calls for the same
        axes, in the same order.
        """
        among = [axis for axis in self.axes if axis.name in self._names(names)]
        found = [axis for axis in among if axis.size > 1]
        if len(found) == 1:
            return found[0]
        if not found:
            return among[0] if among else Axis(USUAL, 1)
        name, size = BETWEEN.join(axis.name for axis in found), math.prod(axis.size for axis in found)
        rank = 0
        for axis in found:
            rank = rank * axis.size + axis.rank
        if not self.ranks:
            return Axis(name, size, rank, _fake(name))
        return Axis(name, size, rank, the(ProcessGroups).of(self._line({axis.name for axis in found})))

    @checked()
    def block(self, name: str, size: int) -> Axis:
        """Return the ranks of an axis in blocks of `size`, as an axis of this rank's block. All must call it."""
        whole = self.axis(name)
        first, rank = whole.rank - whole.rank % size, whole.rank % size
        if not self.ranks or size == 1:
            return Axis(name, size, rank, _fake(name) if size > 1 else "")
        return Axis(name, size, rank, the(ProcessGroups).of(self._line({name})[first : first + size]))

    @checked()
    def along(self, name: str) -> tuple[int, ...]:
        """Return the ranks of the job that differ from this one along one axis only, this one among them."""
        return self._line({name})

    def _names(self, names: Iterable[str]) -> tuple[str, ...]:
        """Return those of `names` that are here. The only axis of a mesh is `data` whatever else it is called."""
        wanted = set(names)
        if len(self.axes) == 1 and self.axes[0].name not in KINDS and USUAL in wanted:
            wanted.add(self.axes[0].name)
        return tuple(axis.name for axis in self.axes if axis.name in wanted)

    def _having(self, what: str) -> tuple[str, ...]:
        """Return the names of the axes with a property of `AxisKind`."""
        return tuple(axis.name for axis in self.axes if getattr(axis.kind, what))

    def _over(self, what: str) -> Axis:
        """Return one axis for all with a property, see `over`."""
        return self.over(self._having(what))

    def _several(self, what: str) -> tuple[Axis, ...]:
        """Return the axes with a size above 1 and a property."""
        return tuple(axis for axis in self.axes if axis.size > 1 and getattr(axis.kind, what))

    def _line(self, names: set[str]) -> tuple[int, ...]:
        """Return the ranks that differ from this one along some axes only."""
        places = [range(axis.size) if axis.name in names else [axis.rank] for axis in self.axes]
        out = []
        for place in itertools.product(*places):
            k = 0
            for axis, x in zip(self.axes, place, strict=True):
                k = k * axis.size + x
            out.append(self.ranks[k])
        return tuple(out)


def resolved(sizes: Mapping[str, int], num_ranks: int, what: str = "Mesh.make") -> tuple[int, ...]:
    """Return the sizes of axes, -1 replaced by what is left of `num_ranks`. `what`: who asks, for errors.

    Raises `TypeError` for an unknown axis, and `ValueError` unless the product is `num_ranks`.
    """
    for name, size in sizes.items():
        if name not in KINDS:
            near = nearest(name, KINDS, 1)
            hint = f"; did you mean {near[0]!r}?" if near else "."
            raise TypeError(f"{what}: axis {name!r} does not exist; the axes are {', '.join(KINDS)}{hint}")
        if not isinstance(size, int) or isinstance(size, bool) or (size < 1 and size != -1):
            raise ValueError(f"{what}: {name}={size!r} is not a size; write a number of ranks, or -1 for all others.")
    if not sizes:
        raise ValueError(f"{what}: expected at least one axis, such as data=8.")
    free = [name for name, size in sizes.items() if size == -1]
    if len(free) > 1:
        raise ValueError(f"{what}: {' and '.join(free)} are both -1, but only one axis can take all other ranks.")
    known = math.prod(size for size in sizes.values() if size != -1)
    product = " x ".join(f"{name} {size}" for name, size in sizes.items() if size != -1) or "1"
    if free and num_ranks % known:
        raise ValueError(f"{what}: {product} does not divide {num_ranks} ranks, so {free[0]}=-1 is impossible.")
    if not free and known != num_ranks:
        raise ValueError(f"{what}: {product} makes {known} ranks, but the job has {num_ranks}.")
    return tuple(num_ranks // known if size == -1 else size for size in sizes.values())


def _fake(name: str) -> str:
    return FAKE + name


def _grid(names: Iterable[str], shape: tuple[int, ...], ranks: Iterable[int], rank: int) -> Mesh:
    """Return the mesh of `ranks` in a row-major grid, with a process group for every axis of several ranks."""
    numbers = tuple(ranks)
    place, left = [], numbers.index(rank)
    for size in reversed(shape):
        left, k = divmod(left, size)
        place.append(k)
    bare = [Axis(name, size, k) for name, size, k in zip(names, shape, reversed(place), strict=True)]
    mesh = Mesh(tuple(bare), numbers)
    return Mesh(tuple(_with_group(mesh, axis) for axis in bare), numbers)


def _with_group(mesh: Mesh, axis: Axis) -> Axis:
    if axis.size == 1:
        return axis
    return Axis(axis.name, axis.size, axis.rank, the(ProcessGroups).of(mesh._line({axis.name})))


def _of_device_mesh(mesh: DeviceMesh) -> Mesh:
    names = mesh.mesh_dim_names or (USUAL,)
    odd = [name for name in names if name not in KINDS]
    if odd and len(names) > 1:
        raise TypeError(
            f"mesh: axes {', '.join(map(repr, odd))} of the DeviceMesh are not ZeroFn's, whose axes are "
            f"{', '.join(KINDS)}. Use these names: init_device_mesh(..., mesh_dim_names=...), or zerofn.Mesh.make(...)."
        )
    grid, groups = mesh.mesh, mesh.get_all_groups()
    sizes, place = tuple(grid.shape), mesh.get_coordinate()
    if place is None:
        raise ValueError(f"mesh: rank {dist.get_rank()} is not in the DeviceMesh, which must contain all ranks.")
    axes = [
        Axis(name, size, k, group.group_name) for name, size, k, group in zip(names, sizes, place, groups, strict=True)
    ]
    found = Mesh(tuple(axes), tuple(grid.flatten().tolist()))
    for axis in axes:
        the(ProcessGroups).know(found._line({axis.name}), axis.group)
    the(Meshes).know(found)
    return found


def join() -> None:
    """Make the default process group if a launcher started this process as one of several, and there is none yet.

    Launchers: torchrun, accelerate, mpirun, srun. Raises `RuntimeError` if the job's rank 0 cannot be found, and for a
    rank on this machine without a CUDA device of its own.
    """
    refuse_after_failure()
    if dist.is_initialized() or not dist.is_available():
        return
    launch = launch_of(os.environ)
    if launch is None:
        return
    backend, options = "gloo", dict[str, Any]()
    if torch.cuda.is_available():
        backend, devices = "cpu:gloo,cuda:nccl", torch.cuda.device_count()
        if launch.local_rank >= devices:
            raise RuntimeError(
                f"local rank {launch.local_rank} has no CUDA device: only {devices} are visible. Start one rank for "
                "each device (torchrun --nproc-per-node gpu), or hide the devices (CUDA_VISIBLE_DEVICES=) to train on "
                "the CPU."
            )
        torch.cuda.set_device(launch.local_rank)
        options["device_id"] = torch.device("cuda", launch.local_rank)  # else NCCL guesses it from the rank
    rank, size = launch.rank, launch.size
    store = fresh(store_at(launch.address, rank, held_for_us=launch.agent_holds_store), rank, size)
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, **options)
