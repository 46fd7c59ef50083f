"""Run a list of passes: those before the decisions about memory, the search, and those after it."""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ..cost.machine import Machine
from ..cost.simulator import usual_for
from ..graph.alias import check_results
from ..graph.edit import copied
from ..graph.nested import calls
from ..graph.pipelines import pipelines
from ..graph.program import Program
from ..graph.segments import RECEIVED
from ..util.patches import uncollected
from ._checked import apply_checked
from ._context import Context, context_of
from ._pass import Pass
from .assign_buffers import MORE
from .budget.by_stage import beside_stages, recomputed_stages, within_stages
from .budget.decision import Choice, order_of
from .budget.hoists import of_bodies
from .budget.search import attempted, beside, graphs, recomputed, within
from .cut_stages import cut_stages
from .hoist_gathers import hoist_gathers
from .tile_logits import tile_logits


class Pipeline:
    """Passes in order. Those that are not the library's own are checked after each run."""

    def __init__(self, passes: Sequence[Pass]) -> None:
        self.passes = list(passes)
        at = (k for k, each in enumerate(self.passes) if each.carries_out)
        self._num_prepare = next(at, len(self.passes))
        self._cuts_stages = any(each.fn is cut_stages for each in self.passes)
        self._searched = [each for each in self.passes[self._num_prepare :] if each.searched]

    def run(self, program: Program) -> None:
        """Apply all passes. `program.timings` gets the seconds of each. ZEROFN_DUMP=dir writes the graph after each."""
        self.prepare(program)
        self.finish(program)

    def prepare(self, program: Program, machine: Machine | None = None) -> None:
        """Apply the passes that run before the decisions about memory.

        `machine`: the cost model that schedules transfers and compares alternatives. None takes a typical
        machine with the same kind of device.
        """
        world = program.num_ranks
        if machine is not None:
            machine.check_ranks(world)
        program.context = Context(machine or usual_for(program.gm), world, program.mesh)
        _dump(program, 0, "capture")
        self._apply(program, self.passes[: self._num_prepare], 1)
        for loop in pipelines(program) if self._cuts_stages else ():
            for value in loop.received():
                value.meta[RECEIVED] = True

    def chooses(self, program: Program, *, memory: int | None, remat: str | None) -> bool:
        """Return whether there is something to decide about memory."""
        hoists = any(each.fn is hoist_gathers for each in self.passes) and any(of_bodies(program.gm).values())
        return memory is not None or remat is not None or hoists

    def decide(self, program: Program, *, memory: int | None, remat: str | None) -> list[Choice]:
        """Return the decisions about memory for the graphs of a prepared program, [] if there is nothing to decide; see
        `budget`.

        Ranks may differ by a few bytes and so decide differently: use the decisions of one rank on all. Raises
        `MemoryError` if no schedule fits into `memory` bytes.
        """
        if not self.chooses(program, memory=memory, remat=remat):
            return []
        start = time.perf_counter()

        def schedule(tried: Program) -> None:
            self._apply(tried, self._searched)

        staged = self._cuts_stages and bool(pipelines(program))
        if staged and remat is not None:
            choices = recomputed_stages(program, remat, schedule)
        elif staged and memory is not None:
            choices = within_stages(program, memory, schedule, MORE)
        elif staged:
            choices = beside_stages(program, schedule)
        elif remat is not None:
            choices = recomputed(program, remat, schedule)
        elif memory is not None:
            tiling = any(each.fn is tile_logits for each in self.passes)
            choices = within(program, memory, schedule, MORE, tiling)  # room for static buffers
        else:
            choices = beside(program, schedule)
        program.timings["choices"] = time.perf_counter() - start
        return choices

    def orders(self, program: Program, choices: Sequence[Choice]) -> list[list[int]]:
        """Return, for each graph of a prepared program, the order in which its transfers would start."""
        tried = attempted(program, choices)
        self._apply(tried, self._searched)
        return [order_of(gm) or [] for gm in graphs(tried.gm)]

    def finish(
        self,
        program: Program,
        *,
        choices: Sequence[Choice] = (),
        budget: int | None = None,
        orders: Sequence[list[int]] = (),
    ) -> None:
        """Apply the remaining passes with the decisions in `choices`. `budget`: bytes that the step, with its
        static buffers, must not exceed. `orders`: of transfers, for each graph, as another rank has them.
        """
        program.budget = budget
        # Choices use the names that nodes have in a copy. A graph never reuses names of deleted nodes; its copy does.
        if choices:
            program.gm = copied(program.gm)
        program.context = context_of(program).decided(graphs(program.gm), choices, orders)
        self._apply(program, self.passes[self._num_prepare :], self._num_prepare + 1)

    def _apply(self, program: Program, passes: Sequence[Pass], first: int | None = None) -> None:
        """Apply passes, and dump the graph after each, numbered from `first` on."""
        for k, each in enumerate(passes, first or 0):
            start = time.perf_counter()
            with uncollected():
                if _is_ours(each.fn):
                    each(program)
                else:
                    apply_checked(program, each)
            program.timings[each.name] = time.perf_counter() - start
            if first is not None:
                _dump(program, k, each.name)
        for gm in graphs(program.gm):
            gm.graph.lint()
            check_results(gm)


def _is_ours(fn: Callable[..., Any]) -> bool:
    """Return whether a function is the library's: such as a pass that a backend of ours adds."""
    return (getattr(fn, "__module__", None) or "").partition(".")[0] == __name__.partition(".")[0]


def _dump(program: Program, number: int, name: str) -> None:
    folder = os.environ.get("ZEROFN_DUMP")
    if not folder:
        return
    path = Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    rank = os.environ.get("RANK", "0")
    named = {call.name: call.body for gm in graphs(program.gm) for _, call in calls(gm)}
    bodies = "".join(f"\n\n# {name}{body.code}" for name, body in named.items())
    target = path / f"{program.name}.{number:02}.{name}.rank{rank}.py"
    fresh = target.with_name(f"{target.name}.{secrets.token_hex(6)}")
    with open(fresh, "x") as file:
        file.write(program.gm.code + bodies)
    os.replace(fresh, target)  # a link there is replaced: in a folder that others use, it may lead anywhere
