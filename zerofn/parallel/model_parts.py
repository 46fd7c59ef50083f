"""The parts of a model that no boundary of a pipeline splits, their costs, and the stages that consist of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.fx import Node

from .. import tree
from ..capture.checked_capture import captured
from ..comm.axes import PIPE
from ..comm.mesh import FAKE, Mesh
from ..cost.op_cost import moved
from ..cost.simulator import Lanes, usual_for
from ..dry_run.fake_machine import fake_machine
from ..geometry.cuts import Pipeline, on_stages
from ..graph.boundaries import holders, reads_of
from ..graph.cut import Piece, cut
from ..graph.first_uses import first_uses
from ..graph.liveness import complete_values
from ..graph.pipelines import Loop, pipelines
from ..graph.region import Region
from ..optim import sgd
from ..passes import standard
from ..passes._context import Context
from ..schedules import Costs, Placement
from ..schedules.balance import Part, balance
from ..sharding.partition import Partition
from ..sharding.precision import Precision
from ..sharding.shard import initial, shard_fake
from ..training.train_state import TrainState
from ..util.errors import nearest
from ..util.sizes import counted
from .pp_plan import PpPlan

_FORMS = ("canonicalize", "functionalize", "share_masks")  # passes that bring a step into the form that is cut


class StageRow(NamedTuple):
    """One stage of a pipeline.

    It has: the stage's rank; the names of the model's parts in it; the number of elements of its parameters; the
    seconds of F, I and W of one microbatch; the bytes that it sends to later stages, and back.
    """

    rank: int
    parts: tuple[str, ...]
    elements: int
    f: float
    i: float
    w: float
    sent: int
    returned: int


def captured_microbatch(
    params: Mapping[str, Tensor],
    mesh: Mesh,
    loss_fn: Callable[[Any, Any], Any],
    batch: Any,
    cuts: Mapping[str, Any],
    precision: Precision,
) -> Loop:
    """Return the loop of a step with one microbatch, all of whose leaves are on stage 0. Runs in a fake machine."""
    machine = fake_machine()
    assert machine is not None

    def fake(x: Any) -> Any:
        return machine.zeros(tuple(x.shape), x.dtype, torch.device("cpu")) if isinstance(x, Tensor) else x

    def scalar(params: Any, batch: Any) -> Any:
        out = loss_fn(params, batch)
        return out[0] if isinstance(out, tuple) and not _is_number(out[1]) else out

    def step(state: Any, batch: Any) -> Any:
        loss, grads = state.value_and_grad(scalar)(batch)
        return state.apply_gradients(grads), loss

    start = {name: nn.Parameter(fake(x), requires_grad=x.requires_grad) for name, x in params.items()}
    state = initial(TrainState.create(params=start, tx=sgd(0.0)), precision)
    (loop,) = captured_loops(step, state, tree.tree_map(fake, batch), mesh, cuts, precision=precision)
    return loop


def captured_loops(
    train_step: Callable[[Any, Any], Any], state: Any, batch: Any, mesh: Mesh, cuts: Mapping[str, Any], **options: Any
) -> list[Loop]:
    """Return the loops over microbatches of a step, all of whose leaves are on stage 0. Runs in a fake machine.

    `state`: the whole first state; `options`: as for `Partition.zero`.
    """
    probe = Pipeline(Placement("line", mesh.size(PIPE)), "1f1b")
    # As the first rank of its pipeline, where all leaves are: so every rank captures the same.
    first = (replace(x, rank=0, group=f"{FAKE}{PIPE}") if x.name == PIPE else x for x in mesh.axes)
    mesh = Mesh(tuple(first))
    on_first = {
        name: (*cuts.get(name, ()), on_stages(probe, 0, shape[0], [0]))
        for name, shape in shapes_of(state.params).items()
        if shape
    }
    partition = Partition.zero(mesh, 3, cuts=on_first, **options)
    program, _ = captured(train_step, shard_fake(state, partition, lambda name: name), batch)
    program.context = Context(usual_for(program.gm), program.num_ranks, program.mesh)
    for each in standard():
        if each.name in _FORMS:
            each(program)
    return pipelines(program)


def shapes_of(params: Any) -> dict[str, tuple[int, ...]]:
    """Return the shapes of parameters by name."""
    leaves, treedef = tree.flatten(params)
    return {name: tuple(x.shape) for name, x in zip(tree.field_names(treedef), leaves, strict=True)}


def _is_number(x: Any) -> bool:
    return isinstance(x, int | float) or isinstance(x, Tensor) and x.numel() == 1


class Parts:
    """The parts of a model that no boundary splits, in the order of their use. `plan`: the model's own; `names`: of
    each part.
    """

    def __init__(self, region: Region, lanes: Lanes, plan: PpPlan | None = None) -> None:
        self.region, self.lanes = region, lanes
        reads = list(dict.fromkeys(name for _, name in reads_of(region)))
        if not reads:
            raise ValueError(
                "pipe: the loss function has no operation that depends on both the batch and the parameters. Pass the "
                "loss function of the model that you train."
            )
        self._part = _part_of(reads, plan)
        self.points = first_uses(region, self._part.__getitem__)
        self.names = [point.name for point in self.points]
        self._costs = [
            Part(
                f=sum(map(lanes.cost, point.forward)),
                i=sum(map(lanes.cost, point.backward)) / 2,
                w=sum(map(lanes.cost, point.backward)) / 2,
                crossing=lanes.message(PIPE, (0, 1), max(point.sent, point.returned)),
            )
            for point in self.points
        ]

    def balanced(self, placement: Placement, microbatches: int) -> list[str]:
        """Return the leaves with which all stages but the first begin, so that ranks have equal work."""
        sizes = balance(self._costs, placement, microbatches)
        return [self.points[k].leaves[0] for k in list(accumulate(sizes))[:-1]]

    def named(self, stages: Sequence[str], placement: Placement) -> list[str]:
        """Return the leaves with which the stages that the user has named begin."""
        if len(stages) != placement.num_stages - 1:
            raise ValueError(
                f"pipe: {placement} has {placement.num_stages} stages, so stages= needs "
                f"{counted(placement.num_stages - 1, 'name')}, one for each stage after the first: "
                f"the part with which it begins. Got {len(stages)}."
            )
        order = [name for point in self.points for name in point.leaves]
        found = []
        for name in stages:
            first = next((x for x in order if x == name or x.startswith(f"{name}.")), None)
            if first is None:
                near = nearest(name, [*self.names, *order], 1)
                hint = f"; did you mean {near[0]!r}?" if near else f"; parts are {', '.join(self.names)}."
                raise ValueError(f"pipe: stages= has {name!r}, but the loss reads nothing with this name{hint}")
            found.append(first)
        if found != sorted(set(found), key=order.index):
            raise ValueError(f"pipe: write stages= in the order in which the loss reads them, got {list(stages)!r}.")
        return found

    def part(self, leaf: str) -> str:
        """Return the name of the part with a leaf's first use."""
        return self._part[leaf]


def _part_of(reads: Sequence[str], plan: PpPlan | None) -> dict[str, str]:
    """Map leaves, in the order of their use, to parts.

    A block is the path up to its first number, or a module that the model's own plan names. Leaves before the first
    block are one part, and leaves after the last block are one. A leaf between blocks belongs to the block before it.
    If a plan names lists of modules, the items of the lists are the blocks, and its other modules are parts between two
    of them.
    """
    block = _block if plan is None else plan.item if plan.lists else plan.module
    blocks = {name: its for name in reads if (its := block(name))}
    if not blocks:
        return {name: name.rpartition(".")[0] or name for name in reads}
    first, last = reads.index(next(iter(blocks))), max(k for k, name in enumerate(reads) if name in blocks)
    found, now = {}, reads[0].rpartition(".")[0] or reads[0]
    for k, name in enumerate(reads):
        if name in blocks:
            now = blocks[name]
        elif k == last + 1 and first <= last:
            now = name.rpartition(".")[0] or name
        elif plan is not None and first < k < last:
            now = plan.module(name) or now
        found[name] = now
    return found


def _block(name: str) -> str | None:
    parts = name.split(".")
    at = next((k for k, part in enumerate(parts) if part.isdigit()), None)
    return None if at is None else ".".join(parts[: at + 1])


class Way:
    """A model that is cut for one placement. `leaves`: the stages of each parameter; `costs`: of each stage."""

    def __init__(self, parts: Parts, placement: Placement, begins: Sequence[str]) -> None:
        self.placement, self._parts = placement, parts
        self.leaves = holders(parts.region, begins)
        self._cut = cut(parts.region, self.leaves, placement.num_stages, range(placement.num_stages))
        seconds = {key: _seconds(piece, parts.lanes) for key, piece in self._cut.pieces.items()}
        number, ranks = placement.num_stages, [placement.rank_of(s) for s in range(placement.num_stages)]
        f, i, w = (tuple(seconds.get((s, kind), 0.0) for s in range(number)) for kind in "FIW")
        self.sent = [sum(e.nbytes for e in self._cut.edges if e.kind == "F" and e.source == s) for s in range(number)]
        self.back = [sum(e.nbytes for e in self._cut.edges if e.kind == "I" and e.source == s) for s in range(number)]
        pairs = list(zip(ranks, ranks[1:], strict=False))
        down = tuple(parts.lanes.message(PIPE, x, n) for x, n in zip(pairs, self.sent[:-1], strict=True))
        up = tuple(parts.lanes.message(PIPE, x[::-1], n) for x, n in zip(pairs, self.back[1:], strict=True))
        saved = tuple(self._kept(s, "F") for s in range(number))
        kept = tuple(self._kept(s, "I") for s in range(number))
        self.costs = Costs(f, i, w, down, up, saved, kept)

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
    """Return the time of a piece's operations, without transfers, which run at the same time."""
    complete_values(piece.graph.graph)
    nodes: list[Node] = [x for x in piece.graph.graph.nodes if x.op == "call_function" and moved(x) is None]
    return sum(map(lanes.cost, nodes))
