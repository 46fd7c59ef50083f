"""`Partition`: over which ranks, in which form and in which memory the tensors of a tree are stored."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

import torch

from ..comm.axes import BETWEEN
from ..comm.mesh import Axis, Mesh
from ..geometry.cuts import Cut, local_shape
from ..offload.policy import Offload, asked_for, on_device
from ..ops.codecs import PLAIN, SPLIT, Codec
from ..util.arguments import told
from ..util.errors import nearest
from .float8 import check_device
from .precision import Precision, resolve
from .wire import check_axes
from .wire import given as given_wire

Stage = Literal[0, 1, 2, 3]
STAGES: tuple[Stage, ...] = get_args(Stage)
CPU = torch.device("cpu")


@dataclass(frozen=True, kw_only=True)
class Partition:
    """Where and how a tree of a state is stored. `zero` makes that of the parameters; `beside` that of a tree beside
    them, such as moments.

    | made by | units are cut over | copies are refreshed over | gradients are reduced |
    |---|---|---|---|
    | `zero(mesh, 0)` | nobody | | once a step |
    | `zero(mesh, 1)` | shards | shards | once a step |
    | `zero(mesh, 2)` | shards | shards | each microbatch |
    | `zero(mesh, 3)` | shards | | each microbatch |
    | the same, on a mesh with `replicate`: MiCS, hybrid sharding | shards | | each microbatch |
    | `zero(mesh, 3, hpz=True)`: ZeRO++'s hpZ | shards, replicas | replicas | each microbatch |

    `shard_over`, `copy_over`: the second and third column, as properties of axes (`comm.axes`); axes of shards are
    `data`, `context` and `expert`. A copy is what parameters hold beside their shards: the whole unit, or with hpZ a
    part of it, from which it is gathered. `late`: the last column. `cuts`: leaf name -> its slices over ranks.
    `precision`: dtypes, and the wire codec. `codec`: in which form shards are stored, if it holds their dtype.
    `tier`: in which memory; of each shard, the first part as its `params` says and the others as its `optimizer`.
    `home`: where the model computes.
    """

    mesh: Mesh
    shard_over: tuple[str, ...]
    copy_over: tuple[str, ...] = ()
    late: bool = False
    cuts: Mapping[str, tuple[Cut, ...]] = field(default_factory=dict, compare=False)
    precision: Precision = Precision()
    codec: Codec = PLAIN
    tier: Offload = Offload()
    home: torch.device = CPU

    @staticmethod
    def zero(
        mesh: Mesh,
        stage: Any = 3,
        *,
        hpz: Any = False,
        precision: Precision | str | None = None,
        wire: Any = None,
        offload: Offload | str | None = None,
        cuts: Mapping[str, Cut | Sequence[Cut]] | None = None,
    ) -> Partition:
        """Return the partition of parameters that the arguments of `shard` mean. `at` completes it.

        Raises `TypeError` or `ValueError` for a value that is not known, or has no effect there.
        """
        check_stage(stage)
        shard_over: tuple[str, ...] = ("shards",) if stage else ()
        copy_over = shard_over if stage in (1, 2) else ()
        if _check_hpz(mesh, stage, hpz):
            shard_over, copy_over = (*shard_over, "replicas"), ("replicas",)
        dtypes = resolve(precision, wire)
        check_axes(given_wire(dtypes.wire), mesh)
        _check_feedback(mesh, dtypes)
        found = Partition(
            mesh=mesh,
            shard_over=shard_over,
            copy_over=copy_over,
            late=stage <= 1,
            cuts=_given(cuts),
            precision=dtypes,
            codec=SPLIT if dtypes.splits(torch.float32) else PLAIN,
        )
        return replace(found, tier=asked_for(offload, found.copies))

    def at(self, home: torch.device) -> Partition:
        """Return the partition for a model that computes on a device: what is offloaded to its own memory is not.
        Raises `ValueError` for a device that cannot compute in the precision.
        """
        if self.precision.fp8 is not None:
            check_device(home)
        return replace(self, tier=on_device(self.tier, home), home=home)

    def beside(self, codec: Codec = PLAIN) -> Partition:
        """Return the partition of a tree beside the parameters, with the same layout. `codec`: of its shards."""
        return replace(self, codec=codec, tier=self.tier.of_optimizer)

    @property
    def stage(self) -> int:
        """The stage of ZeRO that this is."""
        if not self.shard_over:
            return 0
        return (1 if self.late else 2) if self.copy_over == self.shard_over else 3

    def first(self, experts: bool) -> Axis:
        """Return the ranks that a unit, of experts or others, is cut over first. At stage 0 it is not, but reduced over
        them like at other stages.
        """
        return self.mesh.shards_of_experts if experts else self.mesh.shards

    @property
    def again(self) -> Axis | None:
        """The ranks that each part of a unit is cut over once more; None if it is not."""
        return self.mesh.replicas if "replicas" in self.shard_over else None

    def axes(self, experts: bool) -> tuple[Axis, ...]:
        """Return the axes that a unit is cut along, the one that is cut last first."""
        return (self.again, self.first(experts)) if self.again else (self.first(experts),)

    def over(self, experts: bool) -> Axis:
        """Return all ranks that a unit is cut over, in the order of its shards. No transfer goes over all of them at
        once where it is cut again.
        """
        return _nested(self.first(experts), self.again) if self.again else self.first(experts)

    def copied_over(self, experts: bool) -> Axis | None:
        """Return the axis along which shards become the copy that parameters hold beside them, and that every update
        refreshes; None if they hold none.
        """
        if not self.copy_over:
            return None
        axis = self.again or self.first(experts)
        return axis if axis.size > 1 else None

    @property
    def shared_over(self) -> Axis | None:
        """The ranks that have the same shards as this one, with other rows of the batch; None if there are none."""
        return None if self.again or self.mesh.replicas.size == 1 else self.mesh.replicas

    @property
    def copies(self) -> str:
        """In words, for errors, when parameters hold copies and when they do not; "" if they hold none."""
        where = "with hpz" if self.again else "at stages 1 and 2" if self.copied_over(experts=False) else ""
        return where and f"{where}, where every rank holds a gathered copy of the parameters; use stage=3 without hpz"

    def slice_of(self, name: str, shape: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[Cut, ...]]:
        """Return the shape of this rank's slice of a leaf, and its cuts."""
        cuts = self.cuts.get(name, ())
        return local_shape(shape, cuts, self.mesh), cuts


def check_stage(stage: Any) -> None:
    """Raise `ValueError` for an unknown stage."""
    if stage not in STAGES or isinstance(stage, bool):
        near = nearest(stage, STAGES, 1, 0.0)
        raise ValueError(
            f"stage={stage!r} is not known: stages are 0 (replicated), 1, 2 and "
            f"3{f'; did you mean {near[0]}?' if near else '.'}"
        )


def _check_hpz(mesh: Mesh, stage: int, hpz: Any) -> bool:
    """Return it. Raises `TypeError` or `ValueError` if it is not a bool, or has no effect."""
    if not isinstance(hpz, bool):
        raise TypeError(f"shard: hpz must be True or False, got {hpz!r}.")
    if not hpz:
        return False
    sizes = ", ".join(f"{axis.name}={axis.size}" for axis in mesh.axes)
    if stage != 3:
        raise ValueError(
            f"shard: hpz=True has no effect at stage {stage}, where parameters are not gathered for each use. Write "
            "stage=3, or leave hpz out."
        )
    if mesh.replicas.size == 1:
        raise ValueError(
            f"shard: hpz=True has no effect on a mesh of {sizes}: it shards the state over an axis 'replicate' of "
            "several ranks as well, and this mesh has none. Write mesh=zerofn.Mesh.make(replicate=nodes, data=-1), or "
            "leave hpz out."
        )
    if mesh.shards.size == 1:
        raise ValueError(
            f"shard: hpz=True on a mesh of {sizes} would gather parameters from one rank only, which is the same as "
            f"stage=2 on zerofn.Mesh.make(data={mesh.replicas.size}). Write that, or make 'data' as large as the "
            "number of ranks of a node."
        )
    return True


def _check_feedback(mesh: Mesh, precision: Precision) -> None:
    """Raise `NotImplementedError` where what codes leave out is not kept yet."""
    for axis in mesh.axes:
        if axis.size > 1 and axis.kind.experts and precision.feeds_back:
            raise NotImplementedError(
                "shard: feedback=True cannot store the rounding errors of experts' gradients yet, and the mesh has "
                f"experts on {axis.name}={axis.size}. Leave feedback out, or leave that axis out of the mesh."
            )


def _given(cuts: Mapping[str, Cut | Sequence[Cut]] | None) -> dict[str, tuple[Cut, ...]]:
    """Return the cuts of every leaf, by name."""
    found = {name: (x,) if isinstance(x, Cut) else x for name, x in (cuts or {}).items()}
    for name, x in found.items():
        if not isinstance(name, str) or not isinstance(x, list | tuple) or not all(isinstance(y, Cut) for y in x):
            raise TypeError(
                f"shard: cuts must be a dict such as zerofn.parallel.tensor returns, but cuts[{name!r}] is {told(x)}."
            )
    return {name: tuple(x) for name, x in found.items()}


def _nested(within: Axis, beyond: Axis) -> Axis:
    """Return the ranks of two axes as one, for units that are cut along `within`, and each part along `beyond`."""
    if beyond.size == 1:
        return within
    return Axis(
        f"{within.name}{BETWEEN}{beyond.name}", within.size * beyond.size, within.rank * beyond.size + beyond.rank
    )
