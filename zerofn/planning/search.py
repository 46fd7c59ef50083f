"""Plan a step on one mesh after the other. Deep models are estimated first, then planned where they may be fastest."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from ..capture.capture import CaptureError
from ..comm.axes import BETWEEN, KINDS, AxisKind
from ..comm.mesh import Mesh
from ..cost.machine import Machine
from ..training.diloco import Diloco
from .asked import ALL, Asked, Initial, Step
from .deep_models import UNSURE, Estimator, depths_of, is_deep
from .kinds import planner_of
from .plan_row import Config, Row
from .plan_variants import RowPlanner

STAGES = (1, 3)  # 0 keeps more than 1 and sends as much; 2 differs from 1 where a step has several batches
Sizes = Mapping[str, int]  # of axes for which a model is changed; 1 where nothing is said


def _alone(planner: RowPlanner, config: Config) -> list[Row]:
    return [planner.row(config)]


def _with_cut_again(configs: Iterable[Config], mesh: Mesh) -> Iterator[Config]:
    """Yield configurations, and at stage 3 each of them again with hpZ, if the mesh has replicas."""
    for config in configs:
        yield config
        if config.stage == STAGES[-1] and mesh.replicas.size > 1 and config.offload is None and not config.again:
            yield config._replace(again=True)


def _shape(sizes: Sizes) -> Sizes:
    """Return the sizes above 1 of the axes that change a model, in the order of the mesh."""
    changing = [name for name, kind in KINDS.items() if kind.changes_model or kind.stages]
    return {name: sizes[name] for name in changing if sizes.get(name, 1) > 1}


def _cut_by(kind: AxisKind) -> str:
    """Return the function that makes the cuts over an axis, for an error."""
    return f"{kind.cuts}, and a model of your own by {kind.own_cuts}" if kind.own_cuts else kind.cuts


class Search:
    """Plans meshes one by one. `step_on`: the step for a mesh."""

    def __init__(self, step_on: Callable[[Mesh], Step], machine: Machine, machine_argument: str) -> None:
        self.rows: list[Row] = []
        self.name = "step"
        self._step_on, self._machine, self._written = step_on, machine, machine_argument
        self._initials = Initial()
        self._why: list[tuple[Sizes, str]] = []  # shapes that are left out, and why
        self._in_full: dict[Config, Callable[[Config], list[Row]]] = {}  # what plans estimated rows
        self._depths: dict[tuple[int, int, int], None] = {}
        self._length = 0.0  # of a whole sequence

    @property
    def fits(self) -> bool:
        """Whether something fits."""
        return any(row.fits for row in self.rows)

    @property
    def left_out(self) -> list[str]:
        """A sentence for each reason."""
        found: dict[tuple[str, str], list[str]] = {}
        for shape, why in self._why:
            found.setdefault((BETWEEN.join(shape), why), []).append(BETWEEN.join(map(str, shape.values())))
        told = [f"{name} {', '.join(sizes)}: {why}" for (name, why), sizes in found.items()]
        return told + [
            f"~ is an estimate, from plans of {few} and of {more} of the {number} layers. Rows without ~ are planned "
            "in full, and so is every row that may be faster."
            for few, more, number in self._depths
        ]

    def sorted(self) -> list[Row]:
        """Return all rows, the fastest that fit first."""
        return sorted(self.rows, key=lambda row: (not row.fits, -row.speed, row.needs.device))

    @property
    def microbatches(self) -> int:
        """Return how many microbatches a step has, as far as it was planned."""
        return max((row.microbatches for row in self.rows), default=1)

    def takes(self, sizes: Sizes) -> bool:
        """Return whether the model may support these sizes of the axes that change it: it has not refused them yet."""
        return all(_shape(sizes) != refused for refused, _ in self._why)

    def fits_as_it_is(self, sizes: Sizes) -> bool:
        """Return whether a plan fits without recomputation, with these sizes and with whole sequences on each rank."""
        wanted = {**{name: 1 for name, kind in KINDS.items() if kind.tokens}, **sizes}
        return any(
            row.fits and row.config.remat is None and all(row.config.sizes.get(k, 1) == n for k, n in wanted.items())
            for row in self.rows
        )

    def promising(self, name: str) -> list[int]:
        """Return the sizes of an axis that are worth combining with a second axis.

        These are the size in the fastest plan that fits, and in the fastest plan that needs at most twice the memory,
        as a second axis of size 2 saves at most half. If neither exists, the size in the plan that needs the least
        memory.
        """
        fits = [row for row in self.rows if row.fits]
        near = [row for row in self.rows if row.speed and row.needs.device <= 2 * self._machine.memory]
        found = [max(among, key=lambda row: row.speed) for among in (fits, near) if among]
        found = found or [min(self.rows, key=lambda row: row.needs.device)]
        return list(dict.fromkeys(row.config.sizes.get(name, 1) for row in found))

    def plan(self, several: Sequence[dict[str, int]], asked: Asked) -> None:
        """Add the rows of some meshes. Raises what the step raises on a mesh without inner axes."""
        for sizes in several:
            if not self.takes(sizes):
                continue
            try:
                mesh = Mesh.planned(sizes)
                self.rows += self._step_on(mesh).planned_by(functools.partial(self._rows, mesh=mesh, asked=asked))
            except (ValueError, CaptureError) as error:
                if not (shape := _shape(sizes)):
                    raise
                self._why.append((shape, str(error)))

    def settle(self) -> None:
        """Plan in full every estimated plan that fits and is faster than all full plans; or, if nothing fits, the
        estimated plan that needs the least memory.
        """
        while True:
            planned = max((row.speed for row in self.rows if row.fits and row.plan is not None), default=0.0)
            estimated = [k for k, row in enumerate(self.rows) if row.estimate is not None]
            hopes = [k for k in estimated if self.rows[k].speed > planned and self._may_fit(self.rows[k])]
            if hopes:
                self._plan_in_full(max(hopes, key=lambda k: self.rows[k].speed))
            elif estimated and all(row.plan is None for row in self.rows):
                self._plan_in_full(min(estimated, key=lambda k: self.rows[k].needs.device))
            else:
                return

    def _may_fit(self, row: Row) -> bool:
        return row.fits or row.needs.device <= UNSURE * self._machine.memory

    def _plan_in_full(self, k: int) -> None:
        config = self.rows[k].config
        found = self._in_full[config](config)
        planned = {row.config for row in found}
        self.rows = [row for row in self.rows if row.config not in planned] + found

    def _rows(self, step: Step, mesh: Mesh, asked: Asked) -> list[Row]:
        if isinstance(step.train_step, Diloco):
            raise ValueError(
                "plan(mesh='auto') does not support zerofn.diloco. Plan the diloco step on one mesh, such as "
                "{'replicate': 2, 'data': 8}. Or plan its inner step with mesh='auto', on the ranks of one replica."
            )
        planner = planner_of(step, mesh, self._machine, self._written, self._initials)
        self._check(step, mesh, planner.num_tokens / planner.num_rows)
        self.name = step.name
        rows: list[Row] = []
        narrowed, done = asked.stage == list(STAGES), set[Config]()
        ways = self._ways(step, mesh, planner, asked)
        for config in _with_cut_again(planner.configs(asked), mesh):
            alike = config._replace(stage=0, again=False)
            if alike in done and (narrowed or config.again):
                continue  # a lower stage fits, or shards that are cut once: the second cut saves nothing but memory
            if narrowed and config.stage < STAGES[-1] and mesh.shards.size == 1:
                continue  # all stages are the same
            for row in ways(config):
                rows.append(row)
                if row.fits:
                    break
            if rows[-1].fits and rows[-1].config.remat == config.remat:
                done.add(alike)
            in_full = planner.until_one_fits if asked.remat == ALL else functools.partial(_alone, planner)
            self._in_full |= {row.config: in_full for row in rows if row.estimate is not None}
        return rows

    def _ways(self, step: Step, mesh: Mesh, planner: RowPlanner, asked: Asked) -> Callable[[Config], Iterator[Row]]:
        """Return the object that makes the rows of a configuration, with more and more recomputation if `remat` is
        "all".
        """
        if not is_deep(step, asked.remat):
            return planner.ways if asked.remat == ALL else lambda config: iter([planner.row(config)])
        assert step.layers is not None
        if mesh.stages.size > 1:
            raise ValueError(
                f"a pipeline of {step.layers.number} layers cannot be estimated from a model with fewer layers. For a "
                f"full plan, write --mesh {','.join(f'{x.name}={x.size}' for x in mesh.axes if x.size > 1)}."
            )
        self._depths[(*depths_of(step.layers), step.layers.number)] = None
        estimator = Estimator(step, mesh, self._machine, self._written, self._initials)
        return lambda config: estimator.rows(config, asked.remat)

    def _check(self, step: Step, mesh: Mesh, length: float) -> None:
        """Raise `ValueError` if a step was not made for a mesh."""
        cuts = (step.cuts or {}).values()
        along = {cut.axis for x in cuts for cut in (x if isinstance(x, Sequence) else [x])}
        for axis in mesh.slices:
            if axis.name not in along and not axis.kind.stages:  # the planner makes those
                raise ValueError(f"no leaf is cut over it; write cuts={_cut_by(axis.kind)}.")
        parts = mesh.tokens.size
        if parts == 1:
            self._length = length
        elif length * parts != self._length:
            raise ValueError(
                "the batch was not split along the sequence. In the script, write `batch = "
                "zerofn.parallel.split_sequence(batch, mesh)`. If you plan from Python, return it as the third value: "
                "`return train_step, cuts, batch`."
            )
