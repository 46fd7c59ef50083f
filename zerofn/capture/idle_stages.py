"""How long the ranks of a pipeline wait where a step has one microbatch."""

from __future__ import annotations

import logging

from ..graph.pipelines import pipelines
from ..graph.program import Program
from ..schedules import Costs, simulate

log = logging.getLogger("zerofn")


def warn_of_idle_stages(program: Program, name: str) -> None:
    """Log, on the first rank of a pipeline, the idle share of a step with one microbatch: its stages follow each other.

    It is simulated, with the costs that go with the cuts, else with stages that take equally long.
    """
    loops = pipelines(program)
    if any(loop.call.rounds > 1 for loop in loops):
        return  # a single one is what is left of the rows
    for loop in loops:
        used = {stage for stages in loop.leaves.values() for stage in stages}
        if len(used) < 2 or program.mesh is None or program.mesh.stages.rank:
            continue
        placement = loop.pipeline.placement
        costs = loop.pipeline.costs or Costs.even(placement.num_stages)
        line = simulate(loop.pipeline.of(1), costs)
        share = sum(line.idle) / len(line.idle)
        log.warning(
            "%s: the %d ranks along 'pipe' are idle for %.0f %% of the step, because a batch is one microbatch. Write "
            "zerofn.accumulate(state.value_and_grad(loss_fn), %d)(batch), or another multiple, so that stages work on "
            "several microbatches at the same time.",
            name,
            placement.ranks,
            100 * share,
            2 * placement.ranks,
        )
        return
