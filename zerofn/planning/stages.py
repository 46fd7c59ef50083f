"""The stages of a pipeline in plans: the ranks that run them, and the time of a step over all of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ..comm.axes import BETWEEN, PIPE
from ..comm.mesh import Mesh
from ..cost.machine import Machine
from ..cost.op_cost import moved
from ..cost.op_timer import measured
from ..cost.pipelined import simulated
from ..geometry.cuts import AUTO, Cut, stage_cut
from ..graph.nested import graphs_of
from ..graph.node_kinds import argument, is_scatter
from ..graph.pipelines import pipelines, stages_of_leaves
from ..graph.program import Program, ShardedInput, tensor_of
from ..parallel.model_parts import captured_loops, shapes_of
from ..parallel.pipe import Asked, StageCuts, into_stages
from ..schedules import Schedule
from ..sharding.precision import Precision
from .plan import Plan
from .plan_row import OfStages, Pipelined, Sums


def as_stages(mesh: Mesh) -> list[Mesh]:
    """Return a planned mesh as seen by each rank along `pipe`; the mesh itself if it has no such axis."""
    if mesh.stages.size == 1:
        return [mesh]
    return [
        Mesh(tuple(replace(x, rank=rank) if x.name == PIPE else x for x in mesh.axes))
        for rank in range(mesh.stages.size)
    ]


def has_stages(cuts: Mapping[str, Cut | Sequence[Cut]] | None) -> bool:
    """Return whether cuts put leaves on stages."""
    return any(stage_cut([x] if isinstance(x, Cut) else x) is not None for x in (cuts or {}).values())


def stages_of_step(
    train_step: Callable[[Any, Any], Any],
    state: Any,
    batch: Any,
    mesh: Mesh,
    machine: Machine,
    cuts: Mapping[str, Cut | Sequence[Cut]] | None,
    precision: Precision,
) -> StageCuts:
    """Return the cuts of a step's model into the stages of a mesh, in a fake machine. `state`: the whole first state;
    `cuts`: those over other axes.

    Raises `ValueError` for a step that has several losses, or none, and for a model with too few parts.
    """
    given = {name: (x,) if isinstance(x, Cut) else tuple(x) for name, x in (cuts or {}).items()}
    loops = captured_loops(train_step, state, batch, mesh, given, precision=precision)
    if len(loops) != 1:
        raise ValueError(
            f"pipe: the step computes gradients {len(loops)} times, but a plan can split a model into stages only if "
            "the step computes them once. Split it yourself: pass "
            "cuts=zerofn.parallel.pipe(model, mesh, loss_fn, batch)."
        )
    asked = Asked(AUTO, None, None, loops[0].call.rounds)
    return into_stages(loops[0], mesh, machine, asked, given, shapes_of(state.params))


def schedule_of(program: Program) -> Schedule | None:
    """Return the schedule of a captured step that is not cut yet; None if it is not a pipeline."""
    loops = pipelines(program)
    return loops[0].pipeline.of(loops[0].call.rounds) if loops else None


def pipelined(schedule: Schedule | None, plans: Sequence[Plan], machine: Machine) -> Pipelined | None:
    """Return the description of a step as a pipeline, from the plans of its ranks along `pipe`."""
    if schedule is None:
        return None
    graphs, meshes = [plan.graph for plan in plans], [plan.program.mesh for plan in plans]
    with plans[0].there():
        cost = measured(graphs, machine) if machine.is_here else None
        step = simulated(graphs, [mesh for mesh in meshes if mesh is not None], machine, cost)
    ranks = (
        OfStages(
            schedule.placement.stages_of(rank),
            _elements(plan),
            dict(plan.memory().peak),
            idle,
            exposed,
            sum(n for axis, n in plan.sent_along.items() if PIPE in axis.split(BETWEEN)),
        )
        for rank, (plan, idle, exposed) in enumerate(zip(plans, step.idle, step.exposed, strict=True))
    )
    sums, crossing = max(map(_sums, plans)), _crossing(plans[0].program)
    return Pipelined(schedule.name, schedule.microbatches, step.seconds, step.bound, tuple(ranks), sums, crossing)


def _crossing(program: Program) -> float:
    """Return the longest transfer to a next stage, as a share of a stage's forward pass; 0 if costs are unknown."""
    pipeline, _ = stages_of_leaves(program)
    if pipeline is None or pipeline.costs is None:
        return 0.0
    costs = pipeline.costs
    return max((send / f for send, f in zip(costs.down, costs.f, strict=False) if f), default=0.0)


def _sums(plan: Plan) -> Sums:
    """Return what is added over ranks of the gradients of a rank's units."""
    found: dict[str, dict[str, tuple[int, int, int]]] = {}  # unit -> group -> bytes before, after and sent
    for node in (node for gm in graphs_of(plan.graph) for node in gm.graph.nodes if is_scatter(node)):
        moves, whole = moved(node), tensor_of(node.all_input_nodes[0])
        assert moves is not None and whole is not None
        by_group = found.setdefault(moves.unit, {})
        by_group[argument(node, "group")] = whole.nbytes, node.meta["val"].nbytes, moves.nbytes
    units = [list(zip(*by_group.values(), strict=True)) for by_group in found.values()]
    return Sums(sum(max(x) for x, _, _ in units), sum(min(x) for _, x, _ in units), sum(sum(x) for _, _, x in units))


def _elements(plan: Plan) -> int:
    """Return the elements of the parameters on a rank, with the slices that it has."""
    states = (node for node in plan.program.state.nodes if isinstance(node, ShardedInput))
    leaves = {leaf.name: leaf for node in states for leaf in node.spec.layout.leaves}
    return sum(leaf.numel for leaf in leaves.values())
