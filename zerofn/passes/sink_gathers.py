"""Move gathers down to the first use of their unit."""

from __future__ import annotations

from torch.fx import GraphModule

from ..graph.edit import clean, sink, weight_chain
from ._context import Context


def sink_gathers(gm: GraphModule, context: Context) -> None:
    """Move every gather, with its cast, wait and views, to just before the first node that computes with it.

    Capture leaves all gathers at the top of the step, so every unit would be in memory at once. `canonicalize` has
    merged repeated gathers, so each parameter has one.
    """
    sink(gm.graph, weight_chain(gm.graph))
    clean(gm)
