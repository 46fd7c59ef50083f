"""Transformations of a captured step, in the order in which they run."""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from torch.fx import GraphModule

from ..graph.copies import copied
from ..graph.edit import bodies, loops
from ..graph.program import Program
from ..machine import Machine
from ..patches import uncollected
from ..timeline import note_machine
from .arrive import arrive
from .average import average
from .budget import graphs, recomputed, within
from .canonicalize import canonicalize
from .choice import Choice, choose
from .donate import donate
from .own import own
from .park_gradients import park_gradients
from .place_fetches import place_fetches
from .place_gathers import place_gathers
from .place_gradients import place_gradients
from .place_scatters import place_scatters
from .place_updates import place_updates
from .prefetch import prefetch
from .purify import purify
from .read_pieces import read_pieces
from .recompute import recompute
from .reduce_early import reduce_early
from .refresh import refresh
from .regather import regather
from .reuse import reuse
from .rings import MORE, rings
from .split_fetches import split_fetches
from .stash import stash
from .unscale_early import unscale_early
from .update_on_host import update_on_host
from .use_halves import use_halves

Pass = Callable[..., GraphModule]

# These on the step, then on the bodies of its loops:
PREPARE: tuple[Pass, ...] = (use_halves, canonicalize, purify, split_fetches, place_gathers)
SCHEDULE: tuple[Pass, ...] = (
    *PREPARE,
    recompute,
    stash,
    regather,
    place_scatters,
    unscale_early,
    place_gradients,
    prefetch,
    read_pieces,
    reduce_early,
    reuse,
)
WHOLE_STEP: tuple[Pass, ...] = (average,)  # of the step alone, not of loop bodies
DONATION: tuple[Pass, ...] = (donate, place_updates, update_on_host, park_gradients, refresh)
NO_DONATION: tuple[Pass, ...] = (own,)
LAST: tuple[Pass, ...] = (arrive, place_fetches, rings)


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
    passes = [each for each in _rest(donating) if each not in (read_pieces, rings)]
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
