"""`backend="auto"`: eager first, and compiled where the steps to come gain more than compiling takes."""

from __future__ import annotations

import itertools
import logging
import os
import weakref
from collections.abc import Callable, Iterator
from typing import Any

from torch.fx import GraphModule, Node

from ..cost.simulator import Cost, roofline, usual_for
from ..graph.liveness import complete_values
from ..graph.nested import REGION, calls, is_region
from ..graph.program import Program
from ..job.agreement import rank_and_size
from ..job.failures import store_of_job
from ..runtime.executor import Executor
from ..util.process import the
from .aside import done_file, start
from .inductor import Inductor
from .regions import known, missing

log = logging.getLogger("zerofn")
FIRST = 50  # steps before the decision: a short run never compiles
EVERY = 10  # steps between two looks at what the other process and the other ranks have done
STEPS = 1000  # that are assumed to come
SECONDS = 2.0  # to compile a region
NEVER = 0  # no call


class Numbers:
    """Numbers of this process's steps with this backend. Ranks make the same steps in the same order."""

    def __init__(self) -> None:
        self.next = itertools.count().__next__


class Auto(Inductor):
    """`backend="auto"`: the step runs operation by operation for 50 calls. If 1,000 more would then gain more time
    than compiling takes, by the plan's rates, its regions are compiled in a process of their own, one on each host, and
    all ranks take them at the same call.
    """

    def __init__(self) -> None:
        super().__init__()
        self._key = f"regions {the(Numbers).next()}"
        self._runners: weakref.WeakSet[_Runner] = weakref.WeakSet()
        self._calls = 0
        self._at: int | None = None  # the call at which regions are taken, or NEVER, once it is known
        self._regions: list[GraphModule] = []
        self._waits = self._ready = False
        self.agreed: set[str] = set()  # the names of regions that every rank has

    def bind(self, program: Program, tick: Callable[[Node | None], None] | None = None) -> Executor:
        """Return an executor of the graph, which takes regions when they are there. `tick`: see `Executor`."""
        runner = _Runner(self, program, tick)
        self._runners.add(runner)
        return runner

    @property
    def taken(self) -> bool:
        """Whether the calls have come to where regions are taken."""
        return self._at is not None and NEVER < self._at <= self._calls

    def count(self, program: Program) -> None:
        """Count a call of the step. `program`: the one that runs."""
        self._calls += 1
        if self._calls == FIRST:
            self._decide(program)
        if self._calls >= FIRST and self._at is None and self._calls % EVERY == 0:
            self._look()
        if self.taken:
            for runner in [x for x in self._runners if not x.taken]:
                runner.take()

    def _decide(self, program: Program) -> None:
        saved, regions = _saved(program.gm, roofline(usual_for(program.gm))), _unique(program.gm)
        self._regions = regions
        if saved * STEPS < SECONDS * len(regions) or not regions:
            log.info(
                "%s is not compiled: compiling would save %.3g ms per step, and take about %.3g s.",
                program.name, 1e3 * saved, SECONDS * len(regions),
            )  # fmt: skip
            return
        if reason := missing(program.gm):
            log.info("%s is not compiled: %s", program.name, reason)
            return
        log.info(
            "%s: %d regions are compiled in another process, to save %.3g ms per step.",
            program.name, len(regions), 1e3 * saved,
        )  # fmt: skip
        self._waits = True
        if not done_file(regions).exists() and os.environ.get("LOCAL_RANK", "0") == "0":
            start(regions)

    def _look(self) -> None:
        """See whether all ranks have their regions. The first then says at which call they are taken, and which not."""
        rank, size = rank_and_size()
        store = store_of_job() if size > 1 else None
        if not self._ready and (not self._waits or done_file(self._regions).exists()):
            self._ready = True
            lacking = [x.meta[REGION] for x in self._regions if known(x) is None]
            mine = " ".join(["ready" if self._waits else "none", *lacking])
            if store is None:
                self._agree(f"{self._calls if self._waits else NEVER} {mine}")
            else:
                store.set(f"{self._key} of {rank}", mine)
        if store is None:
            return
        if rank == 0 and self._ready:
            found = [x for k in range(size) if (x := store.get(f"{self._key} of {k}"))]
            if len(found) == size:
                ready = any(x.startswith("ready") for x in found)
                at = self._calls + 2 * EVERY if ready else NEVER  # each rank looks once until then
                said = " ".join([str(at), *found])
                store.set(self._key, said)
                self._agree(said)
        elif rank != 0 and (told := store.get(self._key)) is not None:
            self._agree(told)

    def _agree(self, said: str) -> None:
        """Note at which call regions are taken, and all but those that a rank lacks."""
        at, *lacking = said.split()
        self._at = int(at)
        self.agreed = {x.meta[REGION] for x in self._regions}.difference(lacking)


class _Runner(Executor):
    """Runs a graph operation by operation until it takes its compiled regions."""

    def __init__(self, backend: Auto, program: Program, tick: Callable[[Node | None], None] | None) -> None:
        super().__init__(program.gm, tick)
        self._backend, self._program, self._tick = backend, program, tick
        self.taken = False

    def run(self, inputs: list[Any]) -> list[Any]:
        """Run the step, and return its outputs in the graph's order."""
        self._backend.count(self._program)
        return super().run(inputs)

    def take(self) -> None:
        """Run compiled what is compiled, from here on."""
        log.info("%s runs its regions compiled from here on.", self._program.name)
        self.taken = True
        agreed = self._backend.agreed
        super().__init__(self._program.gm, self._tick, lambda gm: known(gm) if gm.meta[REGION] in agreed else None)


def _regions(gm: GraphModule) -> Iterator[tuple[Node, GraphModule, int]]:
    """Yield the nodes that call regions, in bodies too, with their regions and how often they run."""
    for node, call in calls(gm):
        if is_region(call.body):
            yield node, call.body, 1
        else:
            yield from ((x, body, times * call.rounds) for x, body, times in _regions(call.body))


def _unique(gm: GraphModule) -> list[GraphModule]:
    return list({body.meta[REGION]: body for _, body, _ in _regions(gm)}.values())


def _saved(gm: GraphModule, cost: Cost) -> float:
    """Return the seconds by which a step is faster with its regions compiled."""
    complete_values(gm.graph)
    saved = 0.0
    for node, body, times in _regions(gm):
        complete_values(body.graph)
        saved += times * (sum(cost(x) for x in body.graph.nodes if x.op == "call_function") - cost(node))
    return saved
