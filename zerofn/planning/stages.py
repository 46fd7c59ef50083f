"""Stages of a pipeline in plans: the ranks that run them, and what a step of all of them takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ..comm.axes import BETWEEN, PIPE
from ..comm.mesh import Mesh
from ..cost.machine import Machine
from ..cost.op_timer import measured
from ..cost.pipelined import simulated
from ..graph.pipelines import pipelines
from ..graph.program import Program, ShardedInput
from ..schedules import Schedule
from .plan import Plan
from .plan_row import OfStages, Pipelined


def as_stages(mesh: Mesh) -> list[Mesh]:
    """Return a planned mesh as each rank along `pipe` sees it; itself without that axis."""
    if mesh.stages.size == 1:
        return [mesh]
    return [
        Mesh(tuple(replace(x, rank=rank) if x.name == PIPE else x for x in mesh.axes))
        for rank in range(mesh.stages.size)
    ]


def schedule_of(program: Program) -> Schedule | None:
    """Return the schedule of a captured step that is not cut yet; None if it is no pipeline."""
    loops = pipelines(program)
    return loops[0].pipeline.of(loops[0].call.rounds) if loops else None


def pipelined(schedule: Schedule | None, plans: Sequence[Plan], machine: Machine) -> Pipelined | None:
    """Return what is known of a step from the plans of its ranks along `pipe`."""
    if schedule is None:
        return None
    graphs, meshes = [plan.graph for plan in plans], [plan.program.mesh for plan in plans]
    cost = measured(graphs, machine) if machine.is_here else None
    step = simulated(graphs, [mesh for mesh in meshes if mesh is not None], machine, cost)
    ranks = (
        OfStages(
            schedule.placement.stages_of(rank),
            _elements(plan),
            dict(plan.memory().peak),
            idle,
            sum(n for axis, n in plan.sent_along.items() if PIPE in axis.split(BETWEEN)),
        )
        for rank, (plan, idle) in enumerate(zip(plans, step.idle, strict=True))
    )
    return Pipelined(schedule.name, schedule.microbatches, step.seconds, step.bound, tuple(ranks))


def _elements(plan: Plan) -> int:
    """Return the elements of the parameters on a rank, with the slices that it has."""
    states = (node for node in plan.program.state.nodes if isinstance(node, ShardedInput))
    leaves = {leaf.name: leaf for node in states for leaf in node.spec.layout.leaves}
    return sum(leaf.numel for leaf in leaves.values())
