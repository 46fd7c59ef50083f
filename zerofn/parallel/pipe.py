"""The stages of a pipeline: which leaf of a model is on which stage, as cuts for `shard`."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import nn

from ..comm.axes import PIPE
from ..comm.mesh import Mesh
from ..cost.machine import Machine, machine_of, usual
from ..cost.simulator import Lanes
from ..geometry.cuts import AUTO, Cut, Pipeline, on_stages
from ..graph.pipelines import Loop
from ..job.agreement import exchange
from ..schedules import Costs, Placement, Schedule, best, make, usual_limit
from ..schedules.named import ScheduleName
from ..schedules.own import AsSchedule, as_given
from ..sharding.precision import Precision, PrecisionWord, resolve
from ..util.arguments import checked
from ..util.sizes import counted, in_words, time_in_words
from .model_parts import Parts, StageRow, Way, captured_microbatch, shapes_of
from .pp_plan import PpPlan, pp_plan_of

AUTOMATIC = ("1f1b", "interleaved", "zbv")  # one schedule of each placement, in which all others of it are tried
MICROBATCHES = 4  # a rank, if nobody says how many there will be


class StageCuts(dict[str, Any]):
    """How a model is cut into the stages of a pipeline, by leaf, for `zerofn.shard(cuts=)`. It prints as a table.

    `pipeline`: the placement of stages on ranks, and the schedule. `stages`: a row for each stage.
    """

    def __init__(self, cuts: Mapping[str, Any], pipeline: Pipeline, stages: Sequence[StageRow]) -> None:
        super().__init__(cuts)
        self.pipeline, self.stages = pipeline, tuple(stages)

    def __repr__(self) -> str:
        head = ("stage", "rank", "from", "to", "parts", "parameters", "F", "I", "W", "sends", "back")
        rows = [head, *(self._cells(s, row) for s, row in enumerate(self.stages))]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ("  ".join(x.ljust(n) for x, n in zip(row, widths, strict=True)).rstrip() for row in rows)
        return "\n".join([f"{self.pipeline.placement}, schedule {self.pipeline.schedule_in_words}", *lines])

    def _cells(self, stage: int, row: StageRow) -> tuple[str, ...]:
        times = map(time_in_words, (row.f, row.i, row.w))
        sends = (in_words(n) if n else "-" for n in (row.sent, row.returned))
        ends = row.parts[0], row.parts[-1]
        return (str(stage), str(row.rank), *ends, str(len(row.parts)), f"{row.elements:,}", *times, *sends)


@checked()
def pipe(
    model: nn.Module,
    mesh: Mesh,
    loss_fn: Callable[[Any, Any], Any],
    batch: Any,
    *,
    schedule: AsSchedule = AUTO,
    chunks: int | None = None,
    stages: Sequence[str] | None = None,
    microbatches: int | None = None,
    cuts: Mapping[str, Cut | Sequence[Cut]] | None = None,
    precision: Precision | PrecisionWord | None = None,
    machine: Machine | str | os.PathLike[str] | None = None,
) -> dict[str, Any]:
    """Return the cuts of a model into stages over the mesh's axis "pipe", for `shard`. They print as a table.

        mesh = zerofn.Mesh.make(pipe=4, data=2)
        cuts = zerofn.parallel.pipe(model, mesh, loss_fn, batch)
        state = zerofn.shard(init_state, mesh=mesh, cuts=cuts)
        step = zerofn.compile(train_step)  # accumulates over microbatches: zerofn.accumulate(vg, 16)(batch)

    `pipe` captures one microbatch of `loss_fn(params, batch)`, without computing anything; `params` are the parameters
    of `model` by name; the model may be a skeleton. The embedding, each block, and the final norm with the LM head are
    *parts*, which no boundary splits. Parts are spread so that ranks have equal work. If the model has a `pp_plan`, as
    transformers' models do, the modules that the plan names are the parts: each item of a `ModuleList` is a part,
    everything that is read before the first list is a part, and so is everything that is read after the last. A
    parameter that several stages read, such as a tied embedding, lies on each of them.

    - `schedule`: "gpipe", "1f1b" or "zb-h1" (one stage per rank, in a line), "interleaved" or "interleaved-zb"
      (`chunks` stages per rank, in a loop), "zbv" (two, in a V), or "auto". "auto" simulates placements of stages and
      orders of actions, and chooses the fastest within a limit on memory: no rank stores more for the backward pass
      than the worst rank does under the named schedule that needs the least memory for the same stages. A schedule of
      your own is a `zerofn.schedules.Schedule`, or a list of actions for each rank, such as [["0F0", "0B0"], ["1F0",
      "1B0"]]; `Schedule.from_csv` reads the text that torch.distributed.pipelining writes.
    - `stages`: the part, unit or leaf with which each stage after the first begins; by default they are balanced.
    - `microbatches`: the number to choose a schedule for; the step may have another number.
    - `cuts`: those of other axes, such as the result of `zerofn.parallel.tensor`; the result includes them.
    - `precision`: as for `shard`. It changes how stages are balanced: bfloat16 at least halves the time of matrix
      products, so the embedding and norms take a larger share of a step.
    - `machine`: the machine whose costs are used, a name as for `plan`; by default a typical machine, with GPUs if this
      process has one. All ranks use the first rank's costs.

    Raises `ValueError` for a mesh without the axis, for more stages than parts, for an unknown name, for a schedule
    that cannot run, for a `pp_plan` that names no module, and for a loss function that does not read parameters in a
    fixed order. Raises what `shard` raises for a precision.
    """
    several = {name: (x,) if isinstance(x, Cut) else tuple(x) for name, x in (cuts or {}).items()}
    given = {name: tuple(cut for cut in x if cut.axis != PIPE) for name, x in several.items()}
    num_ranks = mesh.axis(PIPE).size
    if num_ranks == 1:
        return dict(cuts or {})
    if microbatches is not None and microbatches < 1:
        raise ValueError(f"pipe: microbatches must be at least 1, got {microbatches}.")
    asked = Asked(as_given(schedule, "pipe"), chunks, stages, microbatches or MICROBATCHES * num_ranks)
    _check_schedule(asked, num_ranks)
    dtypes, params, own = resolve(precision), dict(model.named_parameters()), pp_plan_of(model)
    where = machine_of(machine) if machine is not None else usual(torch.cuda.is_available())
    with where.fake()():
        loop = captured_microbatch(params, mesh, loss_fn, batch, given, dtypes)
        return into_stages(loop, mesh, where, asked, given, shapes_of(params), own)


class Asked(NamedTuple):
    """Arguments of `pipe`."""

    schedule: str | Schedule
    chunks: int | None
    stages: Sequence[str] | None
    microbatches: int


def into_stages(
    loop: Loop,
    mesh: Mesh,
    machine: Machine,
    asked: Asked,
    given: Mapping[str, tuple[Cut, ...]],
    shapes: Mapping[str, tuple[int, ...]],
    plan: PpPlan | None = None,
) -> StageCuts:
    """Return the cuts of a model into stages, in a fake machine.

    `loop`: over its microbatches, with all leaves on stage 0; `given`: cuts over other axes; `shapes`: of parameters,
    by name; `plan`: the model's own.
    """
    parts = Parts(loop.region(), Lanes(machine, mesh.num_ranks, mesh=mesh), plan)
    ways = list(_ways(parts, mesh, asked))
    costs = {way.placement: way.costs for way in ways}
    placement = ways[0].placement
    if len(ways) > 1:
        limit = usual_limit(costs, asked.microbatches)
        placement = best(costs, asked.microbatches, limit).schedule.placement
    way = next(x for x in ways if x.placement == placement)
    pipeline = Pipeline(placement, asked.schedule, way.costs)
    own = {
        name: (*given.get(name, ()), on_stages(pipeline, 0, shapes[name][0], lies))
        for name, lies in way.leaves.items()
        if shapes[name]
    }
    return StageCuts({**given, **own}, pipeline, way.rows(shapes))


def _ways(parts: Parts, mesh: Mesh, asked: Asked) -> Iterator[Way]:
    """Yield the model cut for each placement that the schedule may have."""
    if isinstance(asked.schedule, Schedule):
        placements = [asked.schedule.placement]
    else:
        names = AUTOMATIC if asked.schedule == AUTO else (asked.schedule,)
        placements = [make(cast(ScheduleName, name), mesh.size(PIPE), 1, asked.chunks).placement for name in names]
    few = [x for x in dict.fromkeys(placements) if x.num_stages <= len(parts.names)]
    if not few:
        raise ValueError(_too_few(min(placements, key=lambda x: x.num_stages), parts.names))
    for placement in few:
        if asked.stages is None:
            begins = parts.balanced(placement, asked.microbatches)
        else:
            begins = parts.named(asked.stages, placement)
        way = Way(parts, placement, begins)
        way.costs = _agreed(mesh, way.costs)
        yield way


def _check_schedule(asked: Asked, num_ranks: int) -> None:
    if isinstance(asked.schedule, Schedule):
        if asked.schedule.ranks != num_ranks:
            raise ValueError(
                f"pipe: the schedule has actions for {asked.schedule.ranks} ranks, but the mesh has pipe={num_ranks}."
            )
        if asked.chunks not in (None, asked.schedule.chunks):
            there = counted(asked.schedule.chunks, "stage")
            raise ValueError(f"pipe: chunks={asked.chunks}, but the schedule has {there} per rank. Leave chunks out.")
    elif asked.schedule == AUTO and (asked.chunks is not None or asked.stages is not None):
        what = "chunks" if asked.chunks is not None else "stages"
        raise ValueError(
            f"pipe: {what}= needs one placement of stages, but schedule='auto' chooses among several; name a schedule, "
            "such as '1f1b' (a line), 'interleaved' (a loop) or 'zbv' (a V)."
        )


def _too_few(placement: Placement, names: Sequence[str]) -> str:
    parts = "1 part" if len(names) == 1 else f"{len(names)} parts"
    has = f"the model has {parts} that may begin a stage ({names[0]} ... {names[-1]})"
    if placement.chunks == 1:
        return f"pipe={placement.ranks}: {has}; write pipe={len(names)} or less, or use a model with more blocks."
    return (
        f"pipe={placement.ranks}: {placement} needs {placement.num_stages} parts, but {has}; use a schedule with one "
        "stage per rank, such as '1f1b', fewer ranks, or a model with more blocks."
    )


def _agreed(mesh: Mesh, costs: Costs) -> Costs:
    """Return the first rank's costs, so that all ranks find the same schedule."""
    if not mesh.ranks or mesh.num_ranks == 1:
        return costs
    columns = ("f", "i", "w", "down", "up", "saved", "kept")
    texts = exchange("zerofn.parallel.pipe", json.dumps([getattr(costs, x) for x in columns]))
    return Costs(**{x: tuple(values) for x, values in zip(columns, json.loads(texts[0]), strict=True)})
