"""Gathers sink to the first use of what they fetch."""

from __future__ import annotations

from torch.fx import GraphModule

from ..graph.edit import clean, sink, weight_chain


def sink_gathers(gm: GraphModule) -> GraphModule:
    """Move every gather, with its cast, wait and views, to just before the first node that computes with it.

    Capture leaves them all at the top of the step, where every unit would be alive at once.
    """
    sink(gm.graph, weight_chain(gm.graph))
    return clean(gm)
