"""Over which ranks of a mesh units are cut: along the axes of shards and, with hpZ, over the replicas as well."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..comm.axes import BETWEEN
from ..comm.mesh import Axis, Mesh


@dataclass(frozen=True)
class Partition:
    """A mesh, and along which of its axes units are cut.

    A unit is cut over the ranks of `first`. `again`: the ranks that each of its parts is cut over once more; the parts
    are held as a copy then, from which units are gathered. None: nobody.
    """

    mesh: Mesh
    again: Axis | None = None

    def first(self, experts: bool) -> Axis:
        """Return the ranks that a unit, of experts or others, is cut over first."""
        return self.mesh.shards_of_experts if experts else self.mesh.shards

    def over(self, experts: bool) -> Axis:
        """Return all ranks that a unit is cut over, in the order of its shards. No transfer goes over all of them at
        once where it is cut again.
        """
        return nested(self.first(experts), self.again) if self.again else self.first(experts)

    def axes(self, experts: bool) -> tuple[Axis, ...]:
        """Return the axes that a unit is cut along, the one that is cut last first."""
        return (self.again, self.first(experts)) if self.again else (self.first(experts),)

    def copied_over(self, stage: int, experts: bool) -> Axis | None:
        """Return the axis along which shards become the copy that parameters hold beside them, and that every update
        refreshes; None if they hold none. At stages 1 and 2 the copy is the whole unit.
        """
        axis = self.again or (self.first(experts) if stage in (1, 2) else None)
        return axis if axis is not None and axis.size > 1 else None

    @property
    def shared_over(self) -> Axis | None:
        """The ranks that have the same shards as this one, with other rows of the batch; None if there are none."""
        return None if self.again or self.mesh.replicas.size == 1 else self.mesh.replicas

    def copies(self, stage: int) -> str:
        """Return in words, for errors, when parameters hold copies and when they do not; "" if they hold none."""
        where = "with hpz" if self.again else "at stages 1 and 2" if self.copied_over(stage, experts=False) else ""
        return where and f"{where}, where every rank holds a gathered copy of the parameters; use stage=3 without hpz"


def partition_of(mesh: Mesh, stage: int, hpz: Any) -> Partition:
    """Return the partition of a stage on a mesh.

    Raises `TypeError` or `ValueError` for an `hpz` that is no bool, or that has no effect there.
    """
    if not isinstance(hpz, bool):
        raise TypeError(f"shard: hpz={hpz!r} is neither True nor False.")
    if not hpz:
        return Partition(mesh)
    sizes = ", ".join(f"{axis.name}={axis.size}" for axis in mesh.axes)
    if stage != 3:
        raise ValueError(
            f"shard: hpz=True has no effect at stage {stage}: it is about parameters that are gathered for each use. "
            "Write stage=3, or leave hpz out."
        )
    if mesh.replicas.size == 1:
        raise ValueError(
            f"shard: hpz=True has no effect on a mesh of {sizes}: there is no axis 'replicate' of several ranks that "
            "the state could be cut over, too. Write mesh=zerofn.Mesh.make(replicate=nodes, data=-1), or leave hpz out."
        )
    if mesh.shards.size == 1:
        raise ValueError(
            f"shard: hpz=True on a mesh of {sizes} would gather parameters among one rank, which is stage 2 on "
            f"zerofn.Mesh.make(data={mesh.replicas.size}); write that, or give 'data' the ranks of a node."
        )
    return Partition(mesh, mesh.replicas)


def nested(within: Axis, beyond: Axis) -> Axis:
    """Return the ranks of two axes as one, for units that are cut along `within`, and each part along `beyond`."""
    if beyond.size == 1:
        return within
    return Axis(
        f"{within.name}{BETWEEN}{beyond.name}", within.size * beyond.size, within.rank * beyond.size + beyond.rank
    )
