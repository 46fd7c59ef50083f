"""`Context`: what a pass knows besides the graph that it is called with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch.fx import GraphModule

from ..comm.mesh import Mesh
from ..cost.machine import Machine
from ..cost.simulator import Lanes, lanes_of
from .budget.decision import Choice, choice_of, order_of


@dataclass(frozen=True)
class Context:
    """Where a graph will run, and what was decided about it.

    `machine`: the cost model of a node. `num_ranks` and `mesh`: of the step; the mesh of one rank is None. `choice`:
    the decisions about memory, whose names are those of the graph's nodes. `order`: of its transfers, where ranks must
    take another rank's, see `prefetch`.
    """

    machine: Machine
    num_ranks: int = 1
    mesh: Mesh | None = None
    choice: Choice = Choice()
    order: Sequence[int] | None = None

    def lanes(self) -> Lanes:
        """Return an empty run on the machine."""
        return Lanes(self.machine, self.num_ranks, mesh=self.mesh)


def context_of(gm: GraphModule) -> Context:
    """Return the context of a graph: of a typical machine with one rank, if nothing was noted for it."""
    lanes = lanes_of(gm)
    return Context(lanes.machine, lanes.world, lanes.mesh, choice_of(gm), order_of(gm))
