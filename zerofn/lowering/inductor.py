"""`backend="inductor"`: what lies between two products or transfers is compiled by torch's Inductor."""

from __future__ import annotations

import logging
from collections.abc import Callable

from torch.fx import GraphModule, Node

from ..graph.program import Program
from ..passes import Pass, before
from ..runtime.backend import Eager
from ..runtime.capture_log import MANY
from ..runtime.executor import Executor, Lowered
from .outline_regions import outline_regions
from .regions import Region, compiled, known, missing

log = logging.getLogger("zerofn")


class Inductor(Eager):
    """`backend="inductor"`: the step runs operation by operation, except for regions, which are compiled once each.

    A region that does not compile runs operation by operation, and a line in the log says why. Without a compiler all
    of them do, and so do new regions of a step of many captures.
    """

    def __init__(self) -> None:
        self._num_bound = 0

    def passes(self, ours: list[Pass]) -> list[Pass]:
        """Return all passes, with the one that makes regions."""
        return before("hide_sums", Pass(outline_regions, "body"))(ours)

    def bind(self, program: Program, tick: Callable[[Node | None], None] | None = None) -> Executor:
        """Return an executor of the graph, whose regions are compiled. `tick`: see `Executor`."""
        return Executor(program.gm, tick, self.lowered(program))

    def lowered(self, program: Program) -> Lowered | None:
        """Return what compiles a region of the graph; None, and a line in the log, without a compiler."""
        reason = missing(program.gm)
        if reason:
            log.warning("compile(backend='inductor'): %s Regions run operation by operation.", reason)
            return None
        self._num_bound += 1
        if self._num_bound == MANY + 1:
            log.warning(
                "compile(backend='inductor'): %s was captured %d times, and regions were compiled for each. New ones "
                "of further captures run operation by operation. If shapes change from step to step, pad batches to a "
                "few lengths.", program.name, MANY)  # fmt: skip
        return _lowered if self._num_bound <= MANY else known


def _lowered(gm: GraphModule) -> Region | None:
    try:
        return compiled(gm)
    except Exception as error:
        said = f"{type(error).__name__}: {error}".splitlines()[0]
        log.warning("compile(backend='inductor'): a region of %d operations is not compiled, and runs operation by "
                    "operation: %s", len(gm.graph.nodes), said[:300])  # fmt: skip
        return None
