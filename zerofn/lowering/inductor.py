"""`backend="inductor"`: what lies between two products or transfers is compiled by torch's Inductor."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from torch.fx import GraphModule, Node

from ..graph.nested import REGION
from ..graph.program import Program
from ..passes import Pass, before
from ..passes.tile_logits import tile_logits
from ..runtime.backend import Eager
from ..runtime.capture_log import MANY
from ..runtime.executor import Executor, Lowered
from ..util.process import the
from .outline_regions import outline_regions
from .regions import Compiled, Region, compiled, known, missing

log = logging.getLogger("zerofn")


class Lowering:
    """What the regions of a step run as: compiled, or, those in `left_out`, operation by operation. `how`: a region ->
    what was compiled of it, or None.
    """

    def __init__(self, how: Lowered) -> None:
        self._how, self.left_out = how, the(Compiled).left_out
        self._found: dict[str, Region | None] = {}
        self._seconds = 0.0
        self._before = _counts()

    def __call__(self, gm: GraphModule) -> Region | None:
        """Return a compiled region, or None."""
        name = gm.meta[REGION]
        if name not in self._found and name not in self.left_out:
            start = time.perf_counter()
            self._found[name] = self._how(gm)
            self._seconds += time.perf_counter() - start
            if self._found[name] is None:
                self.left_out.add(name)
        return None if name in self.left_out else self._found[name]

    def leave_out(self, names: set[str]) -> bool:
        """Leave out regions that other ranks leave out. Return whether there is a new one."""
        new = names - self.left_out
        if new:
            log.warning("compile(backend='inductor'): %d regions run operation by operation, as on another rank, which "
                        "has not compiled them.", len(new))  # fmt: skip
        self.left_out |= new
        return bool(new)

    def tell(self, name: str) -> None:
        """Say in the log what was compiled for a step."""
        if self._found:
            made, read = (now - before for now, before in zip(_counts(), self._before, strict=True))
            log.info("%s: %d distinct regions in %.1f s: %d compiled here, %d read from the disk, %d run operation by "
                     "operation.", name, len(self._found), self._seconds, made, read, len(self.left_out))  # fmt: skip


def _counts() -> tuple[int, int]:
    return the(Compiled).made, the(Compiled).read


class Regions(Executor):
    """An executor of a graph with regions. `left_out`: the names of those that it does not run compiled."""

    def __init__(self, program: Program, tick: Callable[[Node | None], None] | None, lowering: Lowering) -> None:
        super().__init__(program.gm, tick, lowering)
        self._gm, self._tick, self._lowering = program.gm, tick, lowering
        lowering.tell(program.name)

    @property
    def left_out(self) -> set[str]:
        """The names of regions that run operation by operation."""
        return self._lowering.left_out

    def leave_out(self, names: set[str]) -> None:
        """Run these operation by operation, too."""
        if self._lowering.leave_out(names):
            super().__init__(self._gm, self._tick, self._lowering)


class Inductor(Eager):
    """`backend="inductor"`: the step runs operation by operation, except for regions, which are compiled once each.

    A region that does not compile, or takes more memory than its operations, runs operation by operation on all ranks,
    and a line in the log says why. Without a compiler all of them do, and so do new regions of a step of many captures.
    """

    def __init__(self) -> None:
        self._num_bound = 0

    def passes(self, ours: list[Pass]) -> list[Pass]:
        """Return all passes, with the one that makes regions; without that of logits in tiles, of which bits would
        depend on the budget: a loss in a region is rounded in another way.
        """
        whole = [each for each in ours if each.fn is not tile_logits]
        return before("hide_sums", Pass(outline_regions, "body"))(whole)

    def bind(self, program: Program, tick: Callable[[Node | None], None] | None = None) -> Executor:
        """Return an executor of the graph, whose regions are compiled. `tick`: see `Executor`."""
        return Regions(program, tick, self.lowering(program))

    def lowering(self, program: Program) -> Lowering:
        """Return what compiles the regions of the graph. Without a compiler it compiles none, and a line in the log
        says why.
        """
        reason = missing(program.gm)
        if reason:
            log.warning("compile(backend='inductor'): %s Regions run operation by operation.", reason)
            return Lowering(lambda gm: None)
        self._num_bound += 1
        if self._num_bound == MANY + 1:
            log.warning(
                "compile(backend='inductor'): %s was captured %d times, and regions were compiled for each. New ones "
                "of further captures run operation by operation. If shapes change from step to step, pad batches to a "
                "few lengths.", program.name, MANY)  # fmt: skip
        return Lowering(_lowered if self._num_bound <= MANY else known)


def _lowered(gm: GraphModule) -> Region | None:
    try:
        return compiled(gm)
    except Exception as error:
        said = f"{type(error).__name__}: {error}".splitlines()[0]
        log.warning("compile(backend='inductor'): a region of %d operations is not compiled, and runs operation by "
                    "operation: %s", len(gm.graph.nodes), said[:300])  # fmt: skip
        return None
