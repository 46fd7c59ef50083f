"""Which mesh? List the meshes of a number of ranks, leave out those that cannot be the fastest, and plan the others."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from ..comm.axes import CONTEXT, EXPERT, KINDS, PIPE, REPLICATE, TENSOR, USUAL
from ..comm.mesh import Mesh
from ..cost.machine import Machine
from .asked import ALL, Asked, Step, halves, listed
from .plan_row import Row
from .search import STAGES, Search, Sizes

AUTO = "auto"
SMALL = 0.25  # of a stage's forward pass: where a transfer to the next stage takes longer, layers are small


class PlannedMeshes(NamedTuple):
    """The result for all meshes: rows, a sentence for each mesh that was left out, and the name of the step."""

    rows: list[Row]
    left_out: list[str]
    name: str


def rows_of_meshes(
    step_on: Callable[[Mesh], Step], world: int, machine: Machine, machine_argument: str, asked: Asked
) -> PlannedMeshes:
    """Return rows for every mesh of `world` ranks that may be the fastest, the fastest first.

    `step_on`: returns the step for a mesh, or raises `ValueError` if the model does not support the mesh.
    """
    narrowed, told = _narrowed(asked, machine)
    search = Search(step_on, machine, machine_argument)
    per_node = machine.ranks

    def plan(shapes: Iterable[Sizes], asked: Asked = narrowed) -> None:
        search.plan(list(meshes(world, per_node, shapes)), asked)

    within, beyond = _tensor_sizes(world, per_node)
    plan({TENSOR: n} for n in within)
    experts = _plan_experts(plan, search, world, within, told)
    for expert in experts:
        _plan_context(plan, search, expert, min(world, per_node), within, told)
    _plan_stages(plan, search, world, per_node, told)
    search.settle()
    if beyond and not search.fits:
        plan({EXPERT: expert, TENSOR: n} for expert in experts for n in beyond)
    elif beyond:
        told.append(f"{several(TENSOR, beyond)}: more ranks than a node has devices; smaller sizes fit.")
    search.settle()
    if asked.offload == ALL and not search.fits:
        stages = [stage for stage in listed(narrowed.stage) if stage == 3]
        tiers = ["cpu"] * (machine.device != "cpu") + ["nvme"] * (machine.disk > 0)
        shapes = [{EXPERT: expert, TENSOR: n} for expert in experts for n in within]
        plan(shapes, narrowed._replace(stage=stages, offload=tiers))
        search.settle()
    elif asked.offload == ALL:
        told.append("offloading: some meshes fit without it; --offload cpu nvme plans it.")
    if odd := [n for n in range(2, world + 1) if world % n == 0 and n not in (*within, *beyond)]:
        told.append(f"{several(TENSOR, odd)}: neither divides the devices of a node nor fills whole nodes.")
    if _between(world, per_node):
        told.append(_why_between(world, per_node))
    return PlannedMeshes(search.sorted(), [*search.left_out, *told, *slower_stages(search.rows)], search.name)


def _plan_experts(
    plan: Callable[[Iterable[Sizes]], None], search: Search, world: int, within: Sequence[int], told: list[str]
) -> list[int]:
    """Plan meshes with an expert axis, and return the sizes of it with which other axes are tried."""
    sizes = [n for n in range(2, world + 1) if world % n == 0]
    if not sizes:
        return [1]
    plan({EXPERT: n} for n in sizes)
    found = search.promising(EXPERT)
    several_ranks = [n for n in found if n > 1]
    if several_ranks and len(within) > 1:
        plan({EXPERT: expert, TENSOR: n} for expert in several_ranks for n in within[1:])
        told.append(
            f"tensor with other sizes of expert: it was tried with {several(EXPERT, several_ranks)}, which without "
            f"tensor is the fastest that fits, or the fastest that needs at most twice the memory."
        )
    return found


def _plan_stages(
    plan: Callable[[Iterable[Sizes]], None], search: Search, world: int, per_node: int, told: list[str]
) -> None:
    """Plan meshes with stages on whole nodes, if a step has at least twice as many microbatches as ranks along `pipe`.

    Stages within a node are not worth trying: its links can gather units while ranks compute, and ranks with stages
    also wait for each other.
    """
    sizes = [n for n in range(2, world + 1) if world % n == 0]
    whole = [n for n in sizes if world % per_node == 0 and world // per_node % n == 0]
    if parts := [n for n in sizes if n not in whole]:
        told.append(
            f"{several(PIPE, parts)}: stages within a node save transfers on fast links, but wait for each other; "
            f"--mesh pipe={parts[0]},data={world // parts[0]} plans one."
        )
    number = search.microbatches
    for n in (n for n in whole if number < 2 * n):
        told.append(
            f"{PIPE} {n}: ranks would wait for {(n - 1) / (number + n - 1):.0%} of a step with {number} "
            f"microbatch{'es' * (number > 1)}; it is tried with {2 * n} or more microbatches."
        )
    plan({PIPE: n} for n in whole if number >= 2 * n)


def slower_stages(rows: Sequence[Row]) -> Iterator[str]:
    """For each number of stages that fits, yield why it is not recommended, if another mesh is faster."""
    fitting = [row for row in rows if row.fits]
    other = max((row for row in fitting if row.config.sizes.get(PIPE, 1) == 1), key=lambda row: row.speed, default=None)
    for n in sorted({row.config.sizes.get(PIPE, 1) for row in fitting} - {1}):
        row = max((row for row in fitting if row.config.sizes.get(PIPE, 1) == n), key=lambda row: row.speed)
        if other is None or row.pipelined is None or other.speed <= row.speed:
            continue
        why = f"with {row.pipelined.microbatches} microbatches, ranks wait for {row.pipelined.idle:.0%} of a step"
        if row.pipelined.crossing > SMALL:
            why += (
                f"; layers are small: sending the output of one takes {row.pipelined.crossing:.0%} of its forward pass"
            )
        faster = f"{other.config.grid} is {other.speed / row.speed:.2f} times as fast"
        yield f"{PIPE} {n} is not recommended: {faster}; {why}."


def _plan_context(
    plan: Callable[[Iterable[Sizes]], None],
    search: Search,
    expert: int,
    node: int,
    within: Sequence[int],
    told: list[str],
) -> None:
    """Plan meshes with a context axis, if whole sequences do not fit without recomputation.

    If they fit, `context` cannot be faster: ranks would gather and send as many bytes for fewer tokens, and also
    exchange heads.
    """
    sizes, within = within[1:], [n for n in within if search.takes({EXPERT: expert, TENSOR: n})]
    tight = [n for n in within if not search.fits_as_it_is({EXPERT: expert, TENSOR: n})]
    plan({EXPERT: expert, CONTEXT: c, TENSOR: n} for n in tight for c in sizes if node % (c * n) == 0)
    if sizes and len(tight) < len(within):
        beside = [several(EXPERT, [expert])] if expert > 1 else []
        beside += [several(TENSOR, [n for n in within if n not in tight])] if tight else []
        there = f" with {' and '.join(beside)}" if beside else ""
        told.append(
            f"{several(CONTEXT, sizes)}{there}: whole sequences fit, and parts of sequences send more bytes a token."
        )


def meshes(world: int, per_node: int, shapes: Iterable[Sizes]) -> Iterator[dict[str, int]]:
    """Yield the meshes of `world` ranks, on nodes of `per_node`, with the given sizes of the axes that change a model.

    Units are sharded over all ranks, or over the ranks of one node with a replica on every node. Axes have the order of
    the mesh: ranks along the last axis, which sends most, are neighbours.
    """
    for shape in shapes:
        inner = math.prod(shape.values())
        if world % inner:
            continue
        replicas = () if shape.get(PIPE, 1) > 1 else _nodes(world, per_node, inner)
        for replicate in (1, *replicas):
            given = {**shape, REPLICATE: replicate, USUAL: world // inner // replicate}
            yield {name: given.get(name, 1) for name in KINDS}


def _nodes(world: int, per_node: int, inner: int) -> tuple[int, ...]:
    """Return the number of nodes if each may have its own replica: there are several, all are whole, and each has
    several ranks along `data`.
    """
    several = world > per_node and world % per_node == 0 and per_node % inner == 0 and per_node > inner
    return (world // per_node,) if several else ()


def _tensor_sizes(world: int, per_node: int) -> tuple[list[int], list[int]]:
    """Return the possible sizes of the tensor axis: those within a node, which divide it, and those beyond a node."""
    sizes = [n for n in range(1, world + 1) if world % n == 0]
    node = min(world, per_node)
    return [n for n in sizes if node % n == 0], [n for n in sizes if n > node and n % node == 0]


def _between(world: int, per_node: int) -> list[int]:
    """Return the sizes of the axis `replicate` that `meshes` leaves out."""
    sizes = [n for n in range(2, world + 1) if world % n == 0]
    return [n for n in sizes if not (world > per_node and world % per_node == 0 and n == world // per_node)]


def _why_between(world: int, per_node: int) -> str:
    return f"{several(REPLICATE, _between(world, per_node))}: " + (
        "replicas within a node need more memory, and send over the same links."
        if world <= per_node
        else "replicas on parts of a node, or on several nodes, need more memory than replicas on one node or none, "
        "and send over the same links."
    )


def several(name: str, sizes: Sequence[int]) -> str:
    """Return an axis with some sizes in words."""
    return f"{name} {', '.join(map(str, sizes))}"


def _narrowed(asked: Asked, machine: Machine) -> tuple[Asked, list[str]]:
    """Return the arguments to try on every mesh where the user has left them out, and sentences on the others."""
    told = []
    if asked.stage == ALL:
        asked = asked._replace(stage=list(STAGES))
        told.append(
            "stages 0 and 2, and stage 3 if stage 1 fits: stage 0 needs more memory than stage 1, stage 3 sends more, "
            "and stage 2 sends more if a step has several microbatches, and is equal otherwise; --stage 0 1 2 3 plans "
            "them."
        )
    if asked.precision == ALL and machine.device != "cpu":
        asked = asked._replace(precision=halves(machine))
        told.append(
            "full precision: needs more memory, and is slower if matrix products take long; --precision none plans it."
        )
    return asked._replace(offload=None if asked.offload == ALL else asked.offload), told
