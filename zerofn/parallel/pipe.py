"""The stages of a pipeline: where a model may be cut, what each part costs, and which leaf lies on which stage."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.fx import Node

from .. import tree
from ..capture.checked_capture import captured
from ..comm.axes import PIPE
from ..comm.mesh import Mesh
from ..cost.machine import Machine, machine_of
from ..cost.simulator import Lanes, usual_for
from ..dry_run.fake_machine import FakeMachine
from ..geometry.cuts import AUTO, Cut, Pipeline, on_stages
from ..graph.boundaries import holders, reads_of
from ..graph.cut import Piece, cut
from ..graph.first_uses import first_uses
from ..graph.liveness import complete_values
from ..graph.pipelines import Loop, pipelines
from ..graph.region import Region
from ..job.agreement import exchange
from ..optim import sgd
from ..passes import standard
from ..passes._context import Context
from ..schedules import NAMES, Costs, Placement, make
from ..schedules.balance import Part, balance
from ..schedules.from_costs import best
from ..sharding.partition import Partition
from ..sharding.shard import initial, shard_fake
from ..training.train_state import TrainState
from ..util.arguments import checked
from ..util.errors import nearest
from ..util.sizes import in_words, time_in_words

_FORMS = ("canonicalize", "functionalize", "share_masks")  # passes that bring a step into the form that is cut
MICROBATCHES = 4  # a rank, if nobody says how many there will be


class StageRow(NamedTuple):
    """One stage: its rank; the parts of the model that it has, by name; elements of its parameters; seconds of F, I and W
    of a microbatch as it was given; bytes that it sends to later stages, and back.
    """

    rank: int
    parts: tuple[str, ...]
    elements: int
    f: float
    i: float
    w: float
    sent: int
    returned: int


class StageCuts(dict[str, Any]):
    """The cuts of a model into the stages of a pipeline, by leaf, for `zerofn.shard(cuts=)`. Printed, a table.

    `pipeline`: the placement of stages on ranks, and the schedule. `stages`: a row for each.
    """

    def __init__(self, cuts: Mapping[str, Any], pipeline: Pipeline, stages: Sequence[StageRow]) -> None:
        super().__init__(cuts)
        self.pipeline, self.stages = pipeline, tuple(stages)

    def __repr__(self) -> str:
        head = ("stage", "rank", "from", "to", "parts", "parameters", "F", "I", "W", "sends", "back")
        rows = [head, *(self._cells(s, row) for s, row in enumerate(self.stages))]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ("  ".join(x.ljust(n) for x, n in zip(row, widths, strict=True)).rstrip() for row in rows)
        return "\n".join([f"{self.pipeline.placement}, schedule {self.pipeline.schedule!r}", *lines])

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
    schedule: str = AUTO,
    chunks: int | None = None,
    stages: Sequence[str] | None = None,
    microbatches: int | None = None,
    cuts: Mapping[str, Cut | Sequence[Cut]] | None = None,
    machine: Machine | str | os.PathLike[str] | None = None,
) -> dict[str, Any]:
    """Return the cuts of a model into stages over the mesh's axis "pipe", for `shard`. They print as a table.

        mesh = zerofn.Mesh.make(pipe=4, data=2)
        cuts = zerofn.parallel.pipe(model, mesh, loss_fn, batch)
        state = zerofn.shard(init_state, mesh=mesh, cuts=cuts)
        step = zerofn.compile(train_step)  # accumulates over microbatches: zerofn.accumulate(vg, 16)(batch)

    One microbatch of `loss_fn(params, batch)` is captured, without computing anything: `params` are those of `model` by
    name, which may be a skeleton. The embedding, each block, and the final norm with the head are parts that no boundary
    cuts; they are spread so that ranks have equal work. A parameter that several stages read, such as a tied embedding,
    lies on each of them.

    `schedule`: "gpipe", "1f1b" or "zb-h1" (one stage a rank, in a line), "interleaved" or "interleaved-zb" (`chunks`
    stages a rank, in a loop), "zbv" (two, in a V), or "auto": the placement and order that a simulation finds the
    fastest. `stages`: the names of parts, units or leaves with which stages but the first begin, instead of the balance.
    `microbatches`: for how many to choose; the step may have another number. `cuts`: those of other axes, as
    `zerofn.parallel.tensor` returns them, which the result includes. `machine`: what costs are for, as for `compile`.
    All ranks take the first one's figures.

    Raises `ValueError` for a mesh without the axis, more stages than parts, an unknown name, and a loss function that
    reads parameters in no order.
    """
    given = {name: (x,) if isinstance(x, Cut) else tuple(x) for name, x in (cuts or {}).items()}
    num_ranks = mesh.axis(PIPE).size
    if num_ranks == 1:
        return dict(cuts or {})
    _check_schedule(schedule, chunks, stages)
    params = dict(model.named_parameters())
    loop = _captured(params, mesh, loss_fn, batch, given)
    lanes = Lanes(machine_of(machine) if machine is not None else usual_for(loop.call.body), mesh.num_ranks, mesh=mesh)
    found = _Parts(loop.region(), lanes)
    candidates = [schedule] if schedule != AUTO else [name for name, row in NAMES.items() if row.style != "line"]
    candidates += ["1f1b"] if schedule == AUTO else []
    number = microbatches or MICROBATCHES * num_ranks
    ways = {}
    for name in candidates:
        placement = make(name, num_ranks, 1, chunks).placement
        begins = found.named(stages, placement) if stages is not None else found.balanced(placement, number, schedule)
        if begins is not None:
            ways[placement] = _Way(loop, found, placement, begins, lanes)
    if not ways:
        raise ValueError(_too_few(num_ranks, found.names))
    costs = {placement: _agreed(mesh, way.costs) for placement, way in ways.items()}
    chosen = best(costs, number).schedule.placement if len(ways) > 1 else next(iter(ways))
    pipeline = Pipeline(chosen, schedule, costs[chosen])
    shapes = {name: tuple(x.shape) for name, x in params.items()}
    own = {
        name: (*given.get(name, ()), on_stages(pipeline, 0, shapes[name][0], lies))
        for name, lies in ways[chosen].leaves.items()
        if shapes[name]
    }
    return StageCuts({**given, **own}, pipeline, ways[chosen].rows(shapes))


def _check_schedule(schedule: str, chunks: int | None, stages: Sequence[str] | None) -> None:
    if schedule != AUTO and schedule not in NAMES:
        near = nearest(schedule, [*NAMES, AUTO], 1)
        hint = f"; did you mean {near[0]!r}?" if near else f"; there are {', '.join([*NAMES, AUTO])}."
        raise ValueError(f"pipe: schedule={schedule!r} is not known{hint}")
    if schedule == AUTO and (chunks is not None or stages is not None):
        what = "chunks" if chunks is not None else "stages"
        raise ValueError(
            f"pipe: {what}= is about one placement, and schedule='auto' chooses among several; name a schedule, such "
            "as '1f1b' (a line), 'interleaved' (a loop) or 'zbv' (a V)."
        )


def _too_few(num_ranks: int, names: Sequence[str]) -> str:
    return (
        f"pipe={num_ranks}: the model has {len(names)} parts that may begin a stage ({names[0]} ... {names[-1]}); give "
        f"pipe at most {len(names)}, or a model with more blocks."
    )


# capture


def _captured(
    params: Mapping[str, Tensor], mesh: Mesh, loss_fn: Callable[[Any, Any], Any], batch: Any, cuts: Mapping[str, Any]
) -> Loop:
    """Return the loop of a step with one microbatch, all of whose leaves lie on stage 0."""
    machine = FakeMachine(False, 1.0, 1.0)
    probe = Pipeline(Placement("line", mesh.size(PIPE)), "1f1b")

    def fake(x: Any) -> Any:
        return machine.zeros(tuple(x.shape), x.dtype, torch.device("cpu")) if isinstance(x, Tensor) else x

    def scalar(params: Any, batch: Any) -> Any:
        out = loss_fn(params, batch)
        return out[0] if isinstance(out, tuple) and not _is_number(out[1]) else out

    def step(state: Any, batch: Any) -> Any:
        loss, grads = state.value_and_grad(scalar)(batch)
        return state.apply_gradients(grads), loss

    with machine():
        start = {name: nn.Parameter(fake(x), requires_grad=x.requires_grad) for name, x in params.items()}
        on_first = {
            name: (*cuts.get(name, ()), on_stages(probe, 0, x.shape[0], [0])) for name, x in params.items() if x.dim()
        }
        partition = Partition.zero(mesh, 3, cuts=on_first)
        state = TrainState.create(params=start, tx=sgd(0.0))
        state = shard_fake(initial(state, partition.precision), partition, lambda name: name)
        program, _ = captured(step, state, tree.tree_map(fake, batch))
        context = Context(usual_for(program.gm), program.num_ranks, program.mesh)
        program.context = context
        for each in standard():
            if each.name in _FORMS:
                each(program)
    (loop,) = pipelines(program)
    return loop


def _is_number(x: Any) -> bool:
    return isinstance(x, int | float) or isinstance(x, Tensor) and x.numel() == 1


# parts


class _Parts:
    """The parts of a model that no boundary cuts, in the order of their use. `names`: of each."""

    def __init__(self, region: Region, lanes: Lanes) -> None:
        self.region = region
        reads = list(dict.fromkeys(name for _, name in reads_of(region)))
        self._part = _part_of(reads)
        self.points = first_uses(region, self._part.__getitem__)
        self.names = [point.name for point in self.points]
        rate = lanes.machine.link
        self._costs = [
            Part(
                f=sum(map(lanes.cost, point.forward)),
                i=sum(map(lanes.cost, point.backward)) / 2,
                w=sum(map(lanes.cost, point.backward)) / 2,
                crossing=max(point.sent, point.returned) / rate,
            )
            for point in self.points
        ]

    def balanced(self, placement: Placement, microbatches: int, asked: str) -> list[str] | None:
        """Return the leaves with which stages but the first begin; None if there are fewer parts than stages, and the
        schedule is one of several.
        """
        if len(self.points) < placement.num_stages:
            if asked == AUTO:
                return None
            raise ValueError(_too_few(placement.num_stages, self.names))
        sizes = balance(self._costs, placement, microbatches)
        return [self.points[k].leaves[0] for k in list(accumulate(sizes))[:-1]]

    def named(self, stages: Sequence[str], placement: Placement) -> list[str]:
        """Return the leaves with which stages begin that the user has named."""
        if len(stages) != placement.num_stages - 1:
            raise ValueError(
                f"pipe: stages= has {len(stages)} name(s), and {placement} has {placement.num_stages} stages, each but "
                f"the first with the name of what it begins with: give {placement.num_stages - 1}."
            )
        order = [name for point in self.points for name in point.leaves]
        found = []
        for name in stages:
            first = next((x for x in order if x == name or x.startswith(f"{name}.")), None)
            if first is None:
                near = nearest(name, [*self.names, *order], 1)
                hint = f"; did you mean {near[0]!r}?" if near else f"; parts are {', '.join(self.names)}."
                raise ValueError(f"pipe: stages= has {name!r}, and nothing that the loss reads is called so{hint}")
            found.append(first)
        if found != sorted(set(found), key=order.index):
            raise ValueError(f"pipe: stages={list(stages)!r} are not in the order in which the loss reads them.")
        return found

    def part(self, leaf: str) -> str:
        """Return the name of the part with a leaf's first use."""
        return self._part[leaf]


def _part_of(reads: Sequence[str]) -> dict[str, str]:
    """Map leaves, in the order of their use, to parts: a block is the path up to its first number. What is read before
    the first block is a part, and what is read behind the last; between them it belongs to the block before.
    """
    blocks = {name: block for name in reads if (block := _block(name))}
    if not blocks:
        return {name: name.rpartition(".")[0] or name for name in reads}
    first, last = reads.index(next(iter(blocks))), max(k for k, name in enumerate(reads) if name in blocks)
    found, now = {}, reads[0].rpartition(".")[0] or reads[0]
    for k, name in enumerate(reads):
        if name in blocks:
            now = blocks[name]
        elif k == last + 1 and first <= last:
            now = name.rpartition(".")[0] or name
        found[name] = now
    return found


def _block(name: str) -> str | None:
    parts = name.split(".")
    at = next((k for k, part in enumerate(parts) if part.isdigit()), None)
    return None if at is None else ".".join(parts[: at + 1])


# stages


class _Way:
    """A model cut for one placement. `leaves`: the stages of each parameter; `costs`: of each stage."""

    def __init__(self, loop: Loop, parts: _Parts, placement: Placement, begins: Sequence[str], lanes: Lanes) -> None:
        self.placement, self._parts = placement, parts
        self.leaves = holders(parts.region, begins)
        self._cut = cut(parts.region, self.leaves, placement.num_stages, range(placement.num_stages))
        seconds = {key: _seconds(piece, lanes) for key, piece in self._cut.pieces.items()}
        number, machine = placement.num_stages, lanes.machine
        f, i, w = (tuple(seconds.get((s, kind), 0.0) for s in range(number)) for kind in "FIW")
        self.sent = [sum(e.nbytes for e in self._cut.edges if e.kind == "F" and e.source == s) for s in range(number)]
        self.back = [sum(e.nbytes for e in self._cut.edges if e.kind == "I" and e.source == s) for s in range(number)]
        down, up = ([n / machine.link + machine.latency for n in x] for x in (self.sent[:-1], self.back[1:]))
        saved = tuple(self._kept(s, "F") for s in range(number))
        kept = tuple(self._kept(s, "I") for s in range(number))
        self.costs = Costs(f, i, w, tuple(down), tuple(up), saved, kept)

    def _kept(self, stage: int, kind: str) -> float:
        piece = self._cut.pieces.get((stage, kind))
        return 0.0 if piece is None else float(piece.kept_bytes)

    def rows(self, shapes: Mapping[str, tuple[int, ...]]) -> list[StageRow]:
        """Return a row for each stage."""
        out = []
        for s in range(self.placement.num_stages):
            mine = [name for name, lies in self.leaves.items() if s in lies]
            named = dict.fromkeys(self._parts.part(name) for name in mine if self.leaves[name][0] == s)
            elements = sum(torch.Size(shapes[name]).numel() for name in mine)
            times = (self.costs.f[s], self.costs.i[s], self.costs.w[s])
            rank = self.placement.rank_of(s)
            out.append(StageRow(rank, tuple(named) or ("-",), elements, *times, self.sent[s], self.back[s]))
        return out


def _seconds(piece: Piece, lanes: Lanes) -> float:
    """Return what the operations of a piece take."""
    complete_values(piece.graph.graph)
    nodes: list[Node] = [x for x in piece.graph.graph.nodes if x.op == "call_function"]
    return sum(map(lanes.cost, nodes))


def _agreed(mesh: Mesh, costs: Costs) -> Costs:
    """Return the first rank's costs: schedules that ranks find from them are the same."""
    if not mesh.ranks or mesh.num_ranks == 1:
        return costs
    columns = ("f", "i", "w", "down", "up", "saved", "kept")
    texts = exchange("zerofn.parallel.pipe", json.dumps([getattr(costs, x) for x in columns]))
    return Costs(**{x: tuple(values) for x, values in zip(columns, json.loads(texts[0]), strict=True)})
