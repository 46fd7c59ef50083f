"""Transformations of a captured step, in the order in which they run."""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from torch.fx import GraphModule

from ..cost.machine import Machine
from ..cost.simulator import note_machine
from ..graph.edit import bodies, copied, loops
from ..graph.program import Program
from ..util.patches import uncollected
from .assign_buffers import MORE, assign_buffers
from .budget.decision import Choice, choose
from .budget.search import graphs, recomputed, within
from .canonicalize import canonicalize
from .copy_outputs import copy_outputs
from .donate import donate
from .fold_split_master import fold_split_master
from .functionalize import functionalize
from .fuse_norms import fuse_norms
from .gradients_as_bucket_views import gradients_as_bucket_views
from .offload_activations import offload_activations
from .offload_gradients import offload_gradients
from .prefetch import prefetch
from .raise_reduce_scatters import raise_reduce_scatters
from .raise_unscale import raise_unscale
from .raise_updates import raise_updates
from .read_local_shards import read_local_shards
from .recompute_activations import recompute_activations
from .reinplace import reinplace
from .reshard import reshard
from .schedule_state_reads import schedule_state_reads
from .sink_gathers import sink_gathers
from .split_state_reads import split_state_reads
from .start_param_gather import start_param_gather
from .sync_replicated_state import sync_replicated_state
from .update_on_host import update_on_host
from .wait_param_gather import wait_param_gather

Pass = Callable[..., GraphModule]

# These on the step, then on the bodies of its loops:
PREPARE: tuple[Pass, ...] = (fold_split_master, canonicalize, functionalize, split_state_reads, sink_gathers)
SCHEDULE: tuple[Pass, ...] = (
    *PREPARE,
    recompute_activations,
    offload_activations,
    reshard,
    raise_reduce_scatters,
    raise_unscale,
    gradients_as_bucket_views,
    prefetch,
    read_local_shards,
    fuse_norms,
    reinplace,
)
WHOLE_STEP: tuple[Pass, ...] = (sync_replicated_state,)  # of the step alone, not of loop bodies
DONATION: tuple[Pass, ...] = (donate, raise_updates, update_on_host, offload_gradients, start_param_gather)
NO_DONATION: tuple[Pass, ...] = (copy_outputs,)
LAST: tuple[Pass, ...] = (wait_param_gather, schedule_state_reads, assign_buffers)


def run(program: Program, *, donating: bool) -> Program:
    """Apply the passes; `program.timings` gets seconds per pass. ZEROFN_DUMP=dir writes the graph after each."""
    return finish(prepare(program), donating=donating)


def prepare(program: Program, machine: Machine | None = None) -> Program:
    """Apply those passes that come before anything is chosen. `machine`: by whose rates transfers are placed, and what
    is cheaper is told; a usual one of its kind where it is not known."""
    world = 1 if program.axis is None else program.axis.size
    if machine is not None:
        machine.check_ranks(world)
    note_machine(program.gm, machine, world)
    _dump(program, 0, "capture")
    return _apply(program, PREPARE, 1)


def decide(program: Program, *, donating: bool, memory: int | None, remat: str | None) -> list[Choice]:
    """What to choose for the graphs of a prepared program; see `budget`. Ranks may come to other choices, by a few
    bytes that are other on each: let all take those of one. Raises `MemoryError` where no schedule keeps to `memory`.
    """
    start = time.perf_counter()
    # Not the pass after which ranks need a unit until other times; nor what takes no more than is left.
    passes = [each for each in _rest(donating) if each not in (read_local_shards, assign_buffers)]
    schedule = functools.partial(_apply, passes=passes)
    if remat:
        choices = recomputed(program, remat, schedule)
    else:
        budget = memory or 0
        choices = within(program, (int(budget / (1 + MORE)), budget), schedule)  # first with room for static buffers
    program.timings["choices"] = time.perf_counter() - start
    return choices


def finish(program: Program, *, donating: bool, choices: Sequence[Choice] = (), budget: int | None = None) -> Program:
    """Apply the other passes to a prepared program, with what was chosen for its graphs. `budget`: bytes that static
    buffers must not exceed, with all else."""
    program.budget = budget
    if choices:  # these name nodes as copies do: a graph's own names go on behind those that it has lost
        program.gm = copied(program.gm)
    for gm, choice in zip(graphs(program.gm), choices, strict=False):
        choose(gm, choice)
    return _apply(program, _rest(donating), len(PREPARE) + 1)


def _rest(donating: bool) -> tuple[Pass, ...]:
    return (*SCHEDULE[len(PREPARE) :], *WHOLE_STEP, *(DONATION if donating else NO_DONATION), *LAST)


def _apply(program: Program, passes: Sequence[Pass], first: int | None = None) -> Program:
    """Apply passes, and write down what comes of each, which is numbered from `first` on."""
    for k, each in enumerate(passes, first or 0):
        start = time.perf_counter()
        on_bodies = each in SCHEDULE
        with uncollected():
            program.gm = each(program.gm) if on_bodies else each(program.gm, program)
            for body in bodies(program.gm) if on_bodies else ():
                each(body)
        program.timings[each.__name__] = time.perf_counter() - start
        if first is not None:
            _dump(program, k, each.__name__)
    for gm in graphs(program.gm):
        gm.graph.lint()
    return program


def _dump(program: Program, number: int, name: str) -> None:
    folder = os.environ.get("ZEROFN_DUMP")
    if not folder:
        return
    path = Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    rank = os.environ.get("RANK", "0")
    bodies = "".join(f"\n\n# {node.args[0]}{body.code}" for node, body in loops(program.gm))
    (path / f"{program.name}.{number:02}.{name}.rank{rank}.py").write_text(program.gm.code + bodies)
