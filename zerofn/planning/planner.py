"""`plan`: what a step needs and does on a cluster that need not exist."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from .. import passes, tree
from .._torch_compat import storage_key
from ..comm.mesh import DATA, Mesh
from ..cost.machine import KNOWN, Machine, machine_of
from ..dry_run.fake_machine import FakeMachine
from ..graph.captured import captured
from ..graph.program import Program
from ..offload.drive_tensor import DriveTensor
from ..passes.budget.decision import Choice
from ..passes.budget.search import OverBudget
from ..sharding.precision import resolve
from ..sharding.shard import initial, shard_fake
from ..sharding.shard_plan import STAGES, check_stage
from ..sharding.sharded import is_sharded
from ..sharding.storage import StoredPart
from ..util.sizes import num_bytes
from .plan import Plan
from .table import Config, Needs, Row, Table, lacking

ALL = "all"
CONTEXT = 1 << 30  # bytes of a device that CUDA and its libraries take
BUDGET = "budget"
REMATS = (None, "full", "auto", BUDGET)


def plan(
    train_step: Callable[[Any, Any], Any],
    init_state: Any,
    batch: Any,
    *,
    world: int = 8,
    machine: Machine | str | os.PathLike[str] = "H100-8",
    stage: Any = ALL,
    offload: Any = ALL,
    precision: Any = ALL,
    remat: Any = ALL,
    rows: int | Sequence[int] | None = None,
    memory: int | str | None = None,
    unit: Callable[[str], str] | None = None,
) -> Table:
    """Plan `train_step(state, batch)` on `world` ranks, in every requested way, and return a `Table` whose `best` is
    recommended.

    The user's own step is captured on tensors without memory: no data is read, nothing is allocated or sent, and
    neither ranks nor devices need exist. `init_state`: as for `shard`. `batch`: one rank's batch, of tensors with
    or without memory; `rows` replaces its size in dim 0. `machine`: a name such as "H100-8", a file from `zerofn
    profile`, or a `zerofn.Machine`. `stage`, `offload`, `precision` and `remat` take one argument of `shard` or
    `compile`, or a list of them; "all" tries every one that makes a difference. `remat="budget"` is
    `compile(memory=...)` with the device's memory. `memory`: bytes of a device, or a text such as "24GiB", instead
    of the machine's; 1 GiB of it is left to CUDA.

    Raises `ValueError` for unknown arguments, `zerofn.CaptureError` for a step that cannot be captured.
    """
    where = machine_of(machine)
    usable = where.memory - (CONTEXT if where.device == "cuda" else 0)
    where = replace(where, memory=usable if memory is None else num_bytes(memory))
    if isinstance(world, bool) or not isinstance(world, int) or world < 1:
        raise ValueError(f"plan(world={world!r}): expected the number of ranks, 1 or more.")
    where.check_ranks(world)
    asked = {"stage": stage, "offload": offload, "precision": precision, "remat": remat}
    planner = _Planner(train_step, init_state, batch, world, where, unit)
    found: list[Row] = []
    for number in [planner.num_rows] if rows is None else _listed(rows):
        for config in _configs(asked, where, world, _count("rows", number)):
            row = planner.row(config._replace(machine=_written(machine)))
            found.append(row)
            if not row.fits and remat == ALL and row.plan is not None:
                with contextlib.suppress(ValueError):  # there is nothing to recompute
                    found += [planner.row(row.config._replace(remat=how)) for how in ("auto", "full")]
    return Table(found, where, world, getattr(train_step, "__name__", "step"))


def _listed(x: Any) -> list[Any]:
    return list(x) if isinstance(x, list | tuple) else [x]


def _written(machine: Machine | str | os.PathLike[str]) -> str:
    """Return a machine as it is written in an argument."""
    if isinstance(machine, Machine):
        return repr(machine.name) if KNOWN.get(machine.name) is machine else "machine"
    return repr(os.fspath(machine))


def _count(name: str, x: Any) -> int:
    if isinstance(x, bool) or not isinstance(x, int) or x < 1:
        raise ValueError(f"plan({name}={x!r}): expected a number above 0, or several.")
    return x


def _configs(asked: dict[str, Any], machine: Machine, world: int, rows: int) -> Iterator[Config]:
    """Return every requested configuration, without those that equal another one."""
    stages = (STAGES if world > 1 else (3,)) if asked["stage"] == ALL else _listed(asked["stage"])
    for stage in stages:
        check_stage(stage)
    accelerated = machine.device != "cpu"
    half = "bf16" if "bfloat16" in machine.flops else "fp16"  # before Ampere, GPUs have no bfloat16
    usual = (half, None) if accelerated else (None,)
    precisions = usual if asked["precision"] == ALL else _listed(asked["precision"])
    remats = (None,) if asked["remat"] == ALL else _listed(asked["remat"])
    for how in remats:
        if how not in REMATS:
            raise ValueError(f"plan(remat={how!r}) is not known; there are 'full', 'auto', 'budget' and None.")
    for precision in precisions:
        for stage in stages:
            tiers = _tiers(stage, machine) if asked["offload"] == ALL else _listed(asked["offload"])
            for offload in tiers:
                yield from (Config(stage, offload, precision, how, rows, machine.memory) for how in remats)


def _tiers(stage: int, machine: Machine) -> list[str | None]:
    """Return the tiers to try at a stage: the more the stage saves, the farther from the device."""
    return [None, *["cpu"] * (stage >= 2 and machine.device != "cpu"), *["nvme"] * (stage == 3 and machine.disk > 0)]


class _Planner:
    """Makes the rows of one step."""

    def __init__(
        self,
        train_step: Callable[[Any, Any], Any],
        init_state: Any,
        batch: Any,
        world: int,
        machine: Machine,
        unit: Callable[[str], str] | None,
    ) -> None:
        self._step, self._batch = train_step, batch
        self._initial = functools.cache(functools.partial(initial, init_state))
        self._world, self._machine, self._unit = world, machine, unit
        tensors = [x for x in tree.leaves(batch) if isinstance(x, Tensor)]
        self.num_rows = next((x.shape[0] for x in tensors if x.dim()), 1)

    def row(self, config: Config) -> Row:
        """Plan one configuration."""
        m = self._machine
        num_ranks = min(self._world, m.ranks)
        fake = FakeMachine(m.device != "cpu", m.host_rate / m.ranks, m.host_link)
        with fake():
            mesh = Mesh.planned({DATA: self._world})
            first = self._initial(resolve(config.precision))
            state = shard_fake(first, config.stage, mesh, config.precision, config.offload, self._unit)
            needs = _state_needs(state)
            lacks = lacking(needs, m, num_ranks)
            if lacks:
                return Row(config, needs, f"{lacks} for the state alone", None)
            batch, tokens, unit = self._scaled(fake, config.rows)
            program, _ = captured(self._step, state, batch)
            program.name = getattr(self._step, "__name__", "step")
            donating = program.new_state is not None
            pipeline = passes.pipeline(donating)
            pipeline.prepare(program, m)
            try:
                choices = self._choices(pipeline, program, config.remat)
            except OverBudget as error:
                return Row(config, needs, f"the least that it takes is {error.least:,}", None)
            pipeline.finish(program, choices=choices, budget=self._budget(config.remat))
            found = Plan(program, m, fake)
        memory = found.memory()
        needs = Needs(memory.total, memory.host, memory.disk)
        return Row(config, needs, lacking(needs, m, num_ranks), found, tokens, unit)

    def _choices(self, pipeline: passes.Pipeline, program: Program, remat: str | None) -> Sequence[Choice]:
        if remat is None:
            return ()
        return pipeline.decide(program, memory=self._budget(remat), remat=None if remat == BUDGET else remat)

    def _budget(self, remat: str | None) -> int | None:
        return int(self._machine.memory) if remat == BUDGET else None

    def _scaled(self, fake: FakeMachine, rows: int) -> tuple[Any, int, str]:
        """Return the batch with that many rows, without memory; its number of tokens, or of rows if it has none;
        and which it is.
        """
        leaves, treedef = tree.flatten(self._batch, is_leaf=is_sharded)
        made = [self._leaf(fake, x, rows) for x in leaves]
        whole = [x for x in made if isinstance(x, Tensor) and x.dim() > 1 and not x.is_floating_point()]
        number, unit = (whole[0].numel(), "tokens") if whole else (rows, "rows")
        return tree.unflatten(treedef, made), number, unit

    def _leaf(self, fake: FakeMachine, x: Any, rows: int) -> Any:
        if not isinstance(x, Tensor):
            return x
        shape = (rows, *x.shape[1:]) if x.dim() and x.shape[0] == self.num_rows else tuple(x.shape)
        return fake.zeros(shape, x.dtype, torch.device("cpu"))


def _state_needs(state: Any) -> Needs:
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
