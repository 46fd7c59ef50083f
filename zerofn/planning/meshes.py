"""Which mesh? Enumerate the meshes of some ranks, leave out what cannot be the fastest, and plan the others."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from ..comm.mesh import DATA, REPLICATE, TENSOR, Mesh
from ..cost.machine import Machine
from ..graph.capture import CaptureError
from .rows import ALL, Asked, Initial, RowPlanner, Step, halves, listed
from .table import Config, Row

AUTO = "auto"
STAGES = (1, 3)  # 0 keeps more than 1 and sends as much; 2 differs from 1 where a step has several batches


class Found(NamedTuple):
    """What has been planned so far: rows, sentences on what was left out, and the name of the step."""

    rows: list[Row]
    left_out: list[str]
    name: str


def rows_of_meshes(
    step_on: Callable[[Mesh], Step], world: int, machine: Machine, machine_argument: str, asked: Asked
) -> Found:
    """Return rows on every mesh of `world` ranks that may be the fastest, the fastest first.

    `step_on`: the step for a mesh; it raises `ValueError` for one that the model cannot take.
    """
    narrowed, told = _narrowed(asked, machine)
    search = _Search(step_on, machine, machine_argument)
    within, beyond = _tensor_sizes(world, machine.ranks)
    search.plan(list(meshes(world, machine.ranks, within)), narrowed)
    if beyond and not search.fits:
        search.plan(list(meshes(world, machine.ranks, beyond)), narrowed)
    elif beyond:
        told.append(f"{_several(TENSOR, beyond)}: more ranks than a node has devices, and others fit.")
    if asked.offload == ALL and not search.fits:
        stages = [stage for stage in listed(narrowed.stage) if stage == 3]
        tiers = ["cpu"] * (machine.device != "cpu") + ["nvme"] * (machine.disk > 0)
        search.plan(list(meshes(world, machine.ranks, within)), narrowed._replace(stage=stages, offload=tiers))
    elif asked.offload == ALL:
        told.append("offloading: some meshes fit without; --offload cpu nvme plans it.")
    if odd := [n for n in range(2, world + 1) if world % n == 0 and n not in (*within, *beyond)]:
        told.append(f"{_several(TENSOR, odd)}: neither a part of a node's devices nor whole nodes.")
    if _between(world, machine.ranks):
        told.append(_why_between(world, machine.ranks))
    rows = sorted(search.rows, key=lambda row: (not row.fits, -row.speed, row.needs.device))
    return Found(rows, [*search.left_out, *told], search.name)


def meshes(world: int, per_node: int, tensor_sizes: Sequence[int]) -> Iterator[dict[str, int]]:
    """Yield the meshes of `world` ranks, on nodes of `per_node`, with such sizes of the tensor axis.

    Units are cut over all ranks, or over those of one node with replicas on every node. Axes have the order of the
    mesh: along the last one, which sends most, ranks are neighbours. A new axis is one more loop here.
    """
    for tensor in tensor_sizes:
        for replicate in (1, *_nodes(world, per_node, tensor)):
            yield {REPLICATE: replicate, DATA: world // tensor // replicate, TENSOR: tensor}


def _nodes(world: int, per_node: int, tensor: int) -> tuple[int, ...]:
    """Return the number of nodes, if replicas may have one each: of several, all whole, with several ranks of data."""
    several = world > per_node and world % per_node == 0 and per_node % tensor == 0 and per_node > tensor
    return (world // per_node,) if several else ()


def _tensor_sizes(world: int, per_node: int) -> tuple[list[int], list[int]]:
    """Return the sizes that the tensor axis may have: within a node, which they divide, and beyond it."""
    sizes = [n for n in range(1, world + 1) if world % n == 0]
    node = min(world, per_node)
    return [n for n in sizes if node % n == 0], [n for n in sizes if n > node and n % node == 0]


def _between(world: int, per_node: int) -> list[int]:
    """Return the sizes of the axis "replicate" that `meshes` leaves out."""
    sizes = [n for n in range(2, world + 1) if world % n == 0]
    return [n for n in sizes if not (world > per_node and world % per_node == 0 and n == world // per_node)]


def _why_between(world: int, per_node: int) -> str:
    return f"{_several(REPLICATE, _between(world, per_node))}: " + (
        "replicas within a node keep more, and send over the same links."
        if world <= per_node
        else "replicas of parts of a node, or of several nodes, keep more than those of one node or of none, and "
        "send over the same links."
    )


def _several(name: str, sizes: Sequence[int]) -> str:
    return f"{name} {', '.join(map(str, sizes))}"


def _narrowed(asked: Asked, machine: Machine) -> tuple[Asked, list[str]]:
    """Return what is tried on every mesh where nothing in particular is asked for, and what is not."""
    told = []
    if asked.stage == ALL:
        asked = asked._replace(stage=list(STAGES))
        told.append(
            "stages 0 and 2, and 3 where 1 fits: as 1 with one batch a step, or they keep or send more; "
            "--stage 0 1 2 3 plans them."
        )
    if asked.precision == ALL and machine.device != "cpu":
        asked = asked._replace(precision=halves(machine))
        told.append("full precision: larger, and slower where matrix products take long; --precision none plans it.")
    return asked._replace(offload=None if asked.offload == ALL else asked.offload), told


class _Search:
    """Plans meshes one by one."""

    def __init__(self, step_on: Callable[[Mesh], Step], machine: Machine, machine_argument: str) -> None:
        self.rows: list[Row] = []
        self.name = "step"
        self._step_on, self._machine, self._written = step_on, machine, machine_argument
        self._initials, self._why = Initial(), dict[int, str]()  # size of the tensor axis -> why it is left out

    @property
    def fits(self) -> bool:
        """Whether something fits."""
        return any(row.fits for row in self.rows)

    @property
    def left_out(self) -> list[str]:
        """A sentence for each reason."""
        sizes: dict[str, list[int]] = {}
        for size, why in self._why.items():
            sizes.setdefault(why, []).append(size)
        return [f"{_several(TENSOR, found)}: {why}" for why, found in sizes.items()]

    def plan(self, several: Sequence[dict[str, int]], asked: Asked) -> None:
        """Add the rows of some meshes. Raises what the step raises on a mesh without slices."""
        for sizes in several:
            tensor = sizes[TENSOR]
            if tensor in self._why:
                continue
            try:
                self.rows += self._rows(Mesh.planned(sizes), asked)
            except (ValueError, CaptureError) as error:
                if tensor == 1:
                    raise
                self._why[tensor] = str(error)

    def _rows(self, mesh: Mesh, asked: Asked) -> list[Row]:
        step = self._step_on(mesh)
        if mesh.size(TENSOR) > 1 and not step.cuts:
            raise ValueError("no leaf is cut over it; a model is, by cuts=zerofn.parallel.tensor(model, mesh).")
        self.name = step.name
        planner = RowPlanner(step, mesh, self._machine, self._written, self._initials)
        rows: list[Row] = []
        narrowed, done = asked.stage == list(STAGES), set[Config]()
        for config in planner.configs(asked):
            alike = config._replace(stage=0)
            if narrowed and (alike in done or config.stage < STAGES[-1] and mesh.size(DATA) == 1):
                continue  # a lower stage fits; or all stages are the same
            found = planner.until_one_fits(config) if asked.remat == ALL else [planner.row(config)]
            rows += found
            if found[-1].fits and found[-1].config.remat == config.remat:
                done.add(alike)
        return rows
