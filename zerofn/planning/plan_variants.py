"""Rows of a table: one step on one mesh of one machine, laid out, captured and scheduled in every requested way."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import passes, tree
from .._torch_compat import storage_key
from ..capture.checked_capture import captured
from ..capture.shared_regions import Regions, shared
from ..comm.axes import KINDS, PIPE
from ..comm.current_mesh import as_rank, unlike_work
from ..comm.mesh import Mesh
from ..cost.machine import Machine
from ..dry_run.fake_machine import FakeMachine
from ..graph.edit import copied
from ..graph.nested import calls, repeat
from ..graph.program import Program
from ..offload.drive_tensor import DriveTensor
from ..parallel.pipe import StageCuts
from ..passes.budget.decision import Choice
from ..passes.budget.search import OverBudget
from ..schedules import Schedule
from ..sharding.partition import STAGES, Partition
from ..sharding.precision import Precision, made_for, resolve
from ..sharding.shard import shard_fake
from ..sharding.sharded import is_sharded
from ..sharding.storage import StoredPart
from ..util.sign_of_life import doing
from ..util.sizes import in_words
from .asked import ALL, BUDGET, WAYS, Asked, Cuts, Initial, Step, configs, listed
from .plan import Plan
from .plan_row import Config, Needs, Row, as_code, lacking
from .stages import as_stages, has_stages, pipelined, schedule_of, stages_of_step


def _usual_cuts(mesh: Mesh, written: str = "", **options: str) -> str:
    """Return code that makes cuts on a mesh. `written`: the code for all axes but `pipe`, if it is not the usual one;
    `options`: more arguments of `pipe`, as code.
    """
    known = [kind for kind in reversed(KINDS.values()) if kind.cuts]  # the innermost axis first
    others = written or " | ".join(kind.cuts for kind in known if not kind.stages and mesh.size(kind.name) > 1)
    if mesh.stages.size == 1:
        return others or known[0].cuts
    given = {**({"cuts": others} if others else {}), **options}
    more = "".join(f", {name}={value}" for name, value in given.items())
    return f"{KINDS[PIPE].cuts.removesuffix(')')}{more})"


_DTYPES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16", torch.float64: "fp64"}


class _Prepared(NamedTuple):
    """A captured step with the passes that schedule it, the bytes of its state, and the size of its batch."""

    program: Program
    pipeline: passes.Pipeline
    fake: FakeMachine
    needs: Needs
    tokens: int
    unit: str
    mesh: Mesh
    schedule: Schedule | None
    microbatches: int


class RowPlanner:
    """Makes the rows of one step on one mesh of a machine. `machine_argument`: the machine, as code."""

    def __init__(self, step: Step, mesh: Mesh, machine: Machine, machine_argument: str, initials: Initial) -> None:
        self._step, self._mesh, self._machine = step, mesh, machine
        self._written, self._initials = machine_argument, initials
        self._into: dict[Precision, StageCuts] = {}
        tensors = [x for x in tree.leaves(step.batch) if isinstance(x, Tensor)]
        self.num_rows = next((x.shape[0] for x in tensors if x.dim()), 1)

    def _cuts(self, precision: Precision) -> Cuts | None:
        """Return the cuts of the step, including those into stages."""
        step, fake = self._step, self._fake
        if self._mesh.stages.size == 1 or has_stages(step.cuts):
            return step.cuts
        if precision not in self._into:
            with fake():
                state = self._initials.of(step.init_state, precision)
                batch, *_ = self._scaled(fake, self.num_rows)
                cuts = stages_of_step(step.train_step, state, batch, self._mesh, self._machine, step.cuts, precision)
            self._into[precision] = cuts
        return self._into[precision]

    def rows(self, asked: Asked) -> Iterator[Row]:
        """Plan every requested configuration, and those that do not fit also with recomputation."""
        for config in self.configs(asked):
            row = self.row(config)
            yield row
            if not row.fits and asked.remat == ALL and row.plan is not None:
                with contextlib.suppress(ValueError):  # there is nothing to recompute
                    yield from [self.row(row.config._replace(remat=how)) for how in ("auto", "full")]

    def configs(self, asked: Asked) -> Iterator[Config]:
        """Return every requested configuration."""
        for number in [self.num_rows] if asked.rows is None else listed(asked.rows):
            for config in configs(asked, self._machine, self._mesh, number):
                if self._step.again and asked.stage == ALL and config.stage != STAGES[-1]:
                    continue  # it has no effect there
                cuts = self._cuts_in_words(config)
                yield config._replace(machine=self._written, cuts=cuts, again=self._step.again)

    def _cuts_in_words(self, config: Config, microbatches: int = 1) -> str:
        """Return the code that makes the cuts; empty without. `microbatches`: of the schedule; 1 if not yet known."""
        if not self._step.cuts and self._mesh.stages.size == 1:
            return ""
        given = {} if config.precision is None else {"precision": as_code(config.precision)}
        given |= {"microbatches": str(microbatches)} if microbatches > 1 else {}
        return _usual_cuts(self._mesh, self._step.written, **given, machine=self._written)

    def row(self, config: Config) -> Row:
        """Plan one configuration."""
        config = self.with_dtypes(config)
        found = self._of_ranks(config)
        if isinstance(found, Row):
            return found
        return self._of_all(found, [self._row(config, x, x.program) for x in found])

    def until_one_fits(self, config: Config) -> list[Row]:
        """Plan one configuration, with more and more recomputation until it fits. The step is captured once."""
        rows: list[Row] = []
        for row in self.ways(config):
            rows.append(row)
            if row.fits:
                break
        return rows

    def ways(self, config: Config) -> Iterator[Row]:
        """Plan one configuration, with more and more recomputation, as rows are requested. The step is captured once.

        Raises `ValueError` for other recomputation than none, "auto" and "full".
        """
        config = self.with_dtypes(config)
        found = self._of_ranks(config)
        if isinstance(found, Row):
            yield found
            return
        for how in WAYS[WAYS.index(config.remat) :]:
            try:
                rows = [self._row(config._replace(remat=how), x, _copied(x.program)) for x in found]
                yield self._of_all(found, rows)
            except ValueError:  # there is nothing to recompute
                return

    def with_dtypes(self, config: Config) -> Config:
        """Return a configuration with the dtypes of parameters, if it has no precision, which would set them."""
        if config.precision is not None:
            return config
        with self._fake():
            state = self._initials.of(self._step.init_state, made_for(config.precision, config.wire))
        return config._replace(own=dtypes_of(state))

    def laid(self, config: Config) -> Any:
        """Return the state, laid out on the first rank, without memory."""
        return self._laid(self._fake, config, as_stages(self._mesh)[0])

    def of_state(self, config: Config) -> Needs:
        """Return the bytes of the state alone."""
        return max(state_needs(self._laid(self._fake, config, mesh)) for mesh in as_stages(self._mesh))

    @property
    def num_tokens(self) -> int:
        """The tokens of a rank's batch, or its rows if it has none."""
        return self._scaled(self._fake, self.num_rows)[1]

    @property
    def ranks_of_node(self) -> int:
        """The ranks that share a node's host memory and drives."""
        return min(self._mesh.num_ranks, self._machine.ranks)

    @property
    def _fake(self) -> FakeMachine:
        return self._machine.fake()

    def _laid(self, fake: FakeMachine, config: Config, mesh: Mesh) -> Any:
        """Return the state, laid out."""
        with fake():
            first = self._initials.of(self._step.init_state, made_for(config.precision, config.wire))
            partition = Partition.zero(mesh, cuts=self._cuts(resolve(config.precision)), **config.options)
            return shard_fake(first, partition, self._step.unit)

    def _turned(self, state: Any) -> Any:
        """Return a state in the form that the planned step takes."""
        return state

    def _of_ranks(self, config: Config) -> list[_Prepared] | Row:
        """Return the captured step of every stage's rank, and of every rank of an axis whose ranks run different
        operations. The plan is that of the rank that needs the most.
        """
        doing(f"planning {self._step.name}, {config.label()}")
        found: list[_Prepared] = []
        fake, stages = self._fake, as_stages(self._mesh)
        regions = Regions() if len(stages) > 1 else None
        for mesh in stages:
            with unlike_work() as unlike, shared(regions):
                first = self._prepared(config, mesh, fake)
            if isinstance(first, Row):
                return first
            found.append(first)
            for axis in (x for x in mesh.axes if x.name in unlike):
                for rank in range(1, axis.size):
                    with as_rank(axis, rank):
                        other = self._prepared(config, mesh, fake)
                    assert isinstance(other, _Prepared)  # it has the same state
                    found.append(other)
        return found

    def _of_all(self, found: Sequence[_Prepared], rows: Sequence[Row]) -> Row:
        """Return the row of the rank that needs the most, with the plans of all stages if there are several."""
        worst = max(rows, key=_need)
        if self._mesh.stages.size == 1 or any(row.plan is None for row in rows):
            return worst
        by_stage: dict[int, list[Row]] = {}
        for x, row in zip(found, rows, strict=True):
            by_stage.setdefault(x.mesh.stages.rank, []).append(row)
        of_stages = [max(each, key=_need).plan for each in by_stage.values()]
        plans = [plan for plan in of_stages if plan is not None]
        whole = pipelined(found[0].schedule, plans, self._machine)
        cuts = self._cuts_in_words(worst.config, worst.microbatches)
        return replace(worst, config=worst.config._replace(cuts=cuts), pipelined=whole)

    def _prepared(self, config: Config, mesh: Mesh, fake: FakeMachine) -> _Prepared | Row:
        """Return the captured step, before any decision about memory; a row if the state alone is too large."""
        m = self._machine
        state = self._laid(fake, config, mesh)
        with fake():
            needs = state_needs(state)
            lacks = lacking(needs, m, self.ranks_of_node)
            if lacks:
                return Row(config, needs, f"{lacks} for the state alone", None)
            batch, tokens, unit = self._scaled(fake, config.rows)
            program, _ = captured(self._step.train_step, self._turned(state), batch)
            program.name = self._step.name
            pipeline = passes.pipeline(program.new_state is not None)
            pipeline.prepare(program, m)
            number = max((call.rounds for node, call in calls(program.gm) if node.target is repeat), default=1)
        return _Prepared(program, pipeline, fake, needs, tokens, unit, mesh, schedule_of(program), number)

    def _row(self, config: Config, found: _Prepared, program: Program) -> Row:
        """Schedule a prepared program."""
        m = self._machine
        with found.fake():
            try:
                choices = self._choices(found.pipeline, program, config)
            except OverBudget as error:
                return Row(config, found.needs, f"it needs at least {in_words(error.least)}", None)
            found.pipeline.finish(program, choices=choices, budget=_budget(config))
            plan = Plan(program, m, found.fake)
        memory = plan.memory()
        needs = Needs(memory.total, memory.host, memory.disk)
        lacks = lacking(needs, m, self.ranks_of_node)
        return Row(config, needs, lacks, plan, found.tokens, found.unit, microbatches=found.microbatches)

    def _choices(self, pipeline: passes.Pipeline, program: Program, config: Config) -> Sequence[Choice]:
        remat = None if config.remat == BUDGET else config.remat
        return pipeline.decide(program, memory=_budget(config), remat=remat)

    def _scaled(self, fake: FakeMachine, rows: int) -> tuple[Any, int, str]:
        """Return the batch with this number of rows, without memory; its number of tokens, or of rows if it has no
        tokens; and which of the two it is.
        """
        leaves, treedef = tree.flatten(self._step.batch, is_leaf=is_sharded)
        made = [self._leaf(fake, x, rows) for x in leaves]
        whole = [x for x in made if isinstance(x, Tensor) and x.dim() > 1 and not x.is_floating_point()]
        number, unit = (whole[0].numel(), "tokens") if whole else (rows, "rows")
        return tree.unflatten(treedef, made), number, unit

    def _leaf(self, fake: FakeMachine, x: Any, rows: int) -> Any:
        if not isinstance(x, Tensor):
            return x
        shape = (rows, *x.shape[1:]) if x.dim() and x.shape[0] == self.num_rows else tuple(x.shape)
        return fake.zeros(shape, x.dtype, torch.device("cpu"))


def _budget(config: Config) -> int | None:
    return int(config.memory) if config.remat == BUDGET else None


def _copied(program: Program) -> Program:
    return replace(program, gm=copied(program.gm), buffers=[], drive_space=[], timings={})


def _need(row: Row) -> tuple[bool, float]:
    return not row.fits, row.needs.device


def dtypes_of(state: Any) -> str:
    """Return the dtypes of a state's parameters in a word: "fp32", or "bf16 and fp32", that of most elements first."""
    params = state.get("params", state) if isinstance(state, dict) else getattr(state, "params", state)
    found = Counter[str]()
    for x in tree.leaves(params):
        if isinstance(x, Tensor) and x.is_floating_point():
            found[_DTYPES.get(x.dtype, str(x.dtype).removeprefix("torch."))] += x.numel()
    return " and ".join(name for name, _ in found.most_common())


def state_needs(state: Any) -> Needs:
    """Return the bytes of a rank's state."""
    device: dict[Any, int] = {}  # shards may be views of a gathered copy
    host = disk = 0
    for x in tree.leaves(state, is_leaf=is_sharded):
        parts: list[StoredPart] = [part for shard in x.stored for part in shard.parts] if is_sharded(x) else [x]
        for part in (*parts, *(x.copies or ())) if is_sharded(x) else parts:
            if isinstance(part, Tensor):
                device[storage_key(part)] = part.untyped_storage().nbytes()
            elif isinstance(part, DriveTensor):
                disk += part.nbytes
            else:
                host += part.nbytes
    return Needs(sum(device.values()), host, disk)
