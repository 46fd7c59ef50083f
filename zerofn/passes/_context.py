"""`Context`: what a pass knows besides the graph that it is called with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest

from torch.fx import GraphModule

from ..comm.mesh import Mesh
from ..cost.machine import Machine
from ..cost.simulator import Lanes, Timeline, usual_for
from ..graph.program import Program
from .budget.decision import Choice


@dataclass(frozen=True)
class Context:
    """Where a graph will run, and what was decided about it.

    `machine`: the cost model of a node. `num_ranks` and `mesh`: of the step; the mesh of one rank is None. `choice`:
    the decisions about memory, by the names of the graph's nodes. `order`: the order of the graph's transfers, if all
    ranks must use one rank's order (see `prefetch`). `bodies`: the contexts of the bodies of the step's loops.
    """

    machine: Machine
    num_ranks: int = 1
    mesh: Mesh | None = None
    choice: Choice = Choice()
    order: Sequence[int] | None = None
    bodies: Mapping[GraphModule, Context] = field(default_factory=dict)

    def lanes(self) -> Lanes:
        """Return a simulation on the machine in which nothing has run yet."""
        return Lanes(self.machine, self.num_ranks, mesh=self.mesh)

    def timeline(self, gm: GraphModule) -> Timeline:
        """Return a simulated step."""
        return Timeline(gm, self.machine, self.num_ranks, mesh=self.mesh)

    def of(self, body: GraphModule) -> Context:
        """Return the context of the body of a loop; nothing is decided about one that is not among `bodies`."""
        return self.bodies.get(body) or Context(self.machine, self.num_ranks, self.mesh)

    def decided(
        self, graphs: Sequence[GraphModule], choices: Sequence[Choice], orders: Sequence[Sequence[int]] = ()
    ) -> Context:
        """Return the step's context with decisions for its graphs: the bodies, then the step itself."""
        plain = Context(self.machine, self.num_ranks, self.mesh)
        found = zip_longest(graphs, choices[: len(graphs)], orders[: len(graphs)])
        *bodies, (_, step) = [(gm, replace(plain, choice=x or Choice(), order=order)) for gm, x, order in found]
        return replace(step, bodies=dict(bodies))


def context_of(program: Program) -> Context:
    """Return the context of a step: on a typical machine of its kind, if none was given."""
    return program.context or Context(usual_for(program.gm), program.num_ranks, program.mesh)
