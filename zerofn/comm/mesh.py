"""Ranks and named axes, over torch.distributed's `DeviceMesh`. One process needs no group."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from .arrivals import fresh
from .failures import refuse_after_failure
from .launch import launch_of

DATA = "data"


@dataclass(frozen=True)
class Axis:
    """One named axis of ranks. Axes are equal if name and size are; rank and group say where this process is on it."""

    name: str
    size: int
    rank: int = field(default=0, compare=False)
    group: str = field(default="", compare=False)  # the process group's name; "" without a group

    def __repr__(self) -> str:
        return f"{self.name}={self.rank}/{self.size}"


@dataclass(frozen=True)
class Mesh:
    """The axes of a machine. `Mesh.of(None)` is all ranks of the job along one axis, "data".

    >>> Mesh.of(None).axis("data").size
    1
    """

    axes: tuple[Axis, ...]

    def __repr__(self) -> str:
        return f"Mesh({', '.join(f'{x.name}: rank {x.rank} of {x.size}' for x in self.axes)})"

    @staticmethod
    def of(mesh: Mesh | DeviceMesh | None) -> Mesh:
        """Return a `Mesh` for a `Mesh`, a `DeviceMesh`, or None, which means every rank.

        In a process that a launcher started, makes the process group if there is none yet. Raises `TypeError` for
        anything else.
        """
        if isinstance(mesh, Mesh):
            return mesh
        if isinstance(mesh, DeviceMesh):
            return Mesh(tuple(map(_axis_of(mesh), mesh.mesh_dim_names or (DATA,))))
        if mesh is not None:
            raise TypeError(f"mesh: expected None, a DeviceMesh or a zerofn.Mesh, got {type(mesh).__name__}.")
        join()
        if not dist.is_initialized():
            return Mesh((Axis(DATA, 1),))
        world = dist.group.WORLD
        assert world is not None
        return Mesh((Axis(DATA, dist.get_world_size(), dist.get_rank(), world.group_name),))

    def axis(self, name: str = DATA) -> Axis:
        """Return the axis called `name`. The only axis of a mesh also answers to "data"."""
        for axis in self.axes:
            if axis.name == name:
                return axis
        if name == DATA and len(self.axes) == 1:
            return self.axes[0]
        raise ValueError(f"mesh has no axis {name!r}; its axes are {[a.name for a in self.axes]}.")


def _axis_of(mesh: DeviceMesh) -> Callable[[str], Axis]:
    def axis(name: str) -> Axis:
        group = mesh.get_group(name) if mesh.mesh_dim_names else mesh.get_group()
        return Axis(name, dist.get_world_size(group), dist.get_rank(group), group.group_name)

    return axis


def rank() -> int:
    """Return this process's rank, from 0; 0 if it is alone. Joins the ranks, as `Mesh.of` does.

    >>> rank(), world_size()
    (0, 1)
    """
    return Mesh.of(None).axis().rank


def world_size() -> int:
    """Return the number of ranks. Joins them, as `Mesh.of` does."""
    return Mesh.of(None).axis().size


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
                f"local rank {launch.local_rank} has no CUDA device: {devices} are visible on this machine. Start one "
                "rank a device (torchrun --nproc-per-node gpu), or hide the devices (CUDA_VISIBLE_DEVICES=) to train "
                "on the CPU."
            )
        torch.cuda.set_device(launch.local_rank)
        options["device_id"] = torch.device("cuda", launch.local_rank)  # else NCCL guesses it from the rank
    where = "env://" if launch.launcher == "torchrun" else launch.url  # torchrun's agent may hold the store
    store, rank, size = next(dist.rendezvous(where, launch.rank, launch.size))
    dist.init_process_group(backend, store=fresh(store, rank, size), rank=rank, world_size=size, **options)
