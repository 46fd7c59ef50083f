"""Move gathers down to the first use of what they fetch."""

from __future__ import annotations

from ..graph.edit import clean, sink, weight_chain
from ..graph.program import Program


def sink_gathers(program: Program) -> None:
    """Move every gather, with its cast, wait and views, to just before the first node that computes with it.

    Capture leaves all gathers at the top of the step, where every unit would be in memory at once.
    """
    gm = program.gm
    sink(gm.graph, weight_chain(gm.graph))
    clean(gm)
