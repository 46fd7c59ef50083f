"""Move gathers down to the first use of their unit."""

from __future__ import annotations

from ..graph.edit import clean, sink, weight_chain
from ..graph.program import Program


def sink_gathers(program: Program) -> None:
    """Move every gather, with its cast, wait and views, to just before the first node that computes with it.

    Capture leaves all gathers at the top of the step, so every unit would be in memory at once. `canonicalize` has
    merged repeated gathers, so each parameter has one.
    """
    gm = program.gm
    sink(gm.graph, weight_chain(gm.graph))
    clean(gm)
