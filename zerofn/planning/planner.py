"""`plan`: the memory and time of a step, on a cluster that need not exist."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

from ..comm.axes import USUAL
from ..comm.mesh import Mesh
from ..cost.machine import KNOWN, Machine, machine_of
from ..dry_run.script import NUM_RANKS
from ..memory.turns import outside_steps
from ..offload.policy import Offload, Tier
from ..sharding.partition import Stage
from ..sharding.precision import Precision, PrecisionWord
from ..sharding.wire import Wire, WireWord
from ..util.arguments import checked
from ..util.sign_of_life import sign_of_life
from ..util.sizes import num_bytes
from .asked import ALL, All, Asked, Cuts, Initial, RematToPlan, Step
from .kinds import planner_of
from .meshes import AUTO, rows_of_meshes
from .table import Table

OneWire = WireWord | Wire | Mapping[str, WireWord | Wire | None] | None
CUDA_CONTEXT = 1 << 30  # bytes of a device that CUDA and its libraries take


@checked("train_step", "unit", "hpz")
@outside_steps("zerofn.plan")
def plan(
    train_step: Callable[..., Any],
    init_state: Any,
    batch: Any,
    *,
    world: int | None = None,
    mesh: Mesh | Mapping[str, int] | Literal["auto"] | None = None,
    cuts: Cuts | None = None,
    machine: Machine | str | os.PathLike[str] = "H100-8",
    stage: Stage | Sequence[Stage] | All = ALL,
    offload: Offload | Tier | Sequence[Offload | Tier | None] | All | None = ALL,
    precision: Precision | PrecisionWord | Sequence[Precision | PrecisionWord | None] | All | None = ALL,
    remat: RematToPlan | Sequence[RematToPlan | None] | All | None = ALL,
    rows: int | Sequence[int] | None = None,
    memory: int | str | None = None,
    unit: Callable[[str], str] | None = None,
    hpz: bool = False,
    wire: OneWire | Sequence[OneWire] = None,
) -> Table:
    """Plan `train_step(state, batch)` for all requested combinations of options. The recommended row is `Table.best`.

    Your step is captured on tensors without memory: nothing is read or sent, and neither ranks nor devices are needed.

    - `init_state`, `unit`, `hpz`: as for `shard`.
    - `batch`: one rank's batch, of tensors with or without memory; `rows` replaces its size in dim 0.
    - `world`: the number of ranks; by default all devices if `machine` says how many nodes ("2 x H100-8": 16), else 8.
    - `mesh`: the ranks as a grid, {"data": -1, "tensor": 2}; by default all along `data`.
    - `machine`: "H100-8", or "8 x H100-8" for several nodes; a file from `zerofn profile`; or a `zerofn.Machine`.
    - `stage`, `offload`, `precision`, `remat`, `wire`: an argument of `shard` or `compile`, or a list; "all" (not for
      `wire`) tries all values that make a difference. `remat="budget"` is `compile(memory=...)` with all memory.
    - `memory`: bytes of a device, or a string such as "24GiB", instead of the machine's; 1 GiB of it goes to CUDA.

    To slice a model over `tensor`, make it for a planned mesh, and pass its cuts:

        mesh = zerofn.Mesh.planned({"data": 4, "tensor": 2})
        model = zerofn.skeleton(build)
        cuts = zerofn.parallel.tensor(model, mesh)
        table = zerofn.plan(train_step, init_state, batch, mesh=mesh, cuts=cuts)

    Over `pipe`, the model is cut by `parallel.pipe` unless `cuts` contains stages; `row.pipelined` has all stages.

    `mesh="auto"` plans all meshes that may be the fastest; `table.left_out` lists the others, with the reasons. Each
    mesh needs its own model, so `train_step` is then a function of a mesh that returns (train step, cuts or None). For
    a mesh with an axis `context` it returns (train step, cuts or None, batch), with a rank's part of the sequences of
    `batch`. With `mesh="auto"`, options that you leave out try fewer values than "all": half precision, stages 1 and 3,
    and offloading only if nothing fits without it.

    Raises `ValueError` for unknown arguments, `zerofn.CaptureError` for a step that cannot be captured.
    """
    where, ranks = cluster(machine, world, memory)
    asked = Asked(stage, offload, precision, remat, rows, wire)
    if isinstance(mesh, str):
        if mesh != AUTO:
            raise ValueError(f"plan(mesh={mesh!r}) is not known; write sizes, {{'data': 4, 'tensor': 2}}, or 'auto'.")
        _check_for_all_meshes(cuts, hpz)
        return plan_meshes(
            lambda grid: _step_on(train_step, grid, init_state, batch, unit), ranks, machine, where, asked
        )
    grid = grid_of(ranks, mesh, given=world is not None or where.nodes > 0)
    return plan_step(Step(train_step, init_state, batch, cuts, unit, hpz), grid, machine, where, asked)


def _check_for_all_meshes(cuts: Cuts | None, hpz: bool) -> None:
    """Raise `ValueError` for arguments that cannot be the same for all meshes."""
    if cuts is not None:
        raise ValueError("plan(mesh='auto', cuts=...): every mesh needs different cuts; return them from train_step.")
    if hpz:
        raise ValueError("plan(mesh='auto', hpz=True): leave hpz out; 'auto' tries it on meshes with replicas.")


def plan_step(step: Step, mesh: Mesh, machine: Machine | str | os.PathLike[str], where: Machine, asked: Asked) -> Table:
    """Plan a step on one mesh. `machine`: as the user has written it; `where`: see `cluster`."""
    where.check_ranks(mesh.num_ranks)
    with sign_of_life(f"planning {step.name}"):
        initial = Initial()
        rows = step.planned_by(lambda x: list(planner_of(x, mesh, where, written(machine), initial).rows(asked)))
    return Table(rows, where, mesh.num_ranks, step.name)


def plan_meshes(
    step_on: Callable[[Mesh], Step], world: int, machine: Machine | str | os.PathLike[str], where: Machine, asked: Asked
) -> Table:
    """Plan every mesh of `world` ranks that may be the fastest. `step_on`: returns the step for a mesh. `machine`: as
    the user has written it; `where`: see `cluster`.
    """
    where.check_ranks(world)
    with sign_of_life("planning meshes"):
        rows, left_out, name = rows_of_meshes(step_on, world, where, written(machine), asked)
    return Table(rows, where, world, name, left_out)


def cluster(
    machine: Machine | str | os.PathLike[str], world: int | None, memory: int | str | None
) -> tuple[Machine, int]:
    """Return a machine with the memory that a step may use, and the number of ranks.

    Raises `ValueError` for an unknown machine, and for a number of ranks below 1 or above the machine's.
    """
    where = machine_of(machine)
    usable = where.memory - (CUDA_CONTEXT if where.device == "cuda" else 0)
    where = replace(where, memory=usable if memory is None else num_bytes(memory, "plan"))
    if world is not None and (isinstance(world, bool) or not isinstance(world, int) or world < 1):
        raise ValueError(f"plan(world={world!r}): expected the number of ranks, 1 or more.")
    there = where.nodes * where.ranks
    if world is not None and there and world > there:
        raise ValueError(f"plan(world={world}): {where.name} has {there} devices; leave world out to use all of them.")
    return where, world or there or NUM_RANKS


def grid_of(ranks: int, mesh: Mesh | Mapping[str, int] | None, given: bool) -> Mesh:
    """Return the mesh to plan for. `given`: whether the user has chosen the number of ranks.

    Raises `ValueError` for a mesh of another number of ranks.
    """
    if mesh is None:
        return Mesh.planned({USUAL: ranks})
    if not isinstance(mesh, Mesh):
        return Mesh.planned(mesh, ranks if given or -1 in mesh.values() else None)
    if given and ranks != mesh.num_ranks:
        raise ValueError(f"plan: the mesh {mesh} has {mesh.num_ranks} ranks, but world is {ranks}; leave world out.")
    return mesh


def _step_on(make: Callable[..., Any], mesh: Mesh, init_state: Any, batch: Any, unit: Any) -> Step:
    """Return the step that the user's function makes for a mesh. Raises `TypeError` if it returns something else."""
    found = make(mesh)
    if not isinstance(found, tuple) or len(found) not in (2, 3) or not callable(found[0]):
        raise TypeError(
            "plan(mesh='auto'): expected train_step to be a function of a mesh that returns (train step, cuts), for "
            "example lambda mesh: (train_step, None); or (train step, cuts, batch), with a rank's part of the "
            "sequences."
        )
    return Step(found[0], init_state, found[2] if len(found) == 3 else batch, found[1], unit)


def written(machine: Machine | str | os.PathLike[str]) -> str:
    """Return a machine as it is written in an argument."""
    if isinstance(machine, Machine):
        return repr(machine.name) if KNOWN.get(machine.name) is machine else "machine"
    return repr(os.fspath(machine))
