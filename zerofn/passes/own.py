"""What a step that donates nothing returns is its caller's own."""

from __future__ import annotations

from torch.fx import GraphModule

from ..graph.alias import roots
from ..graph.edit import clean, copy_of
from ..graph.program import Program


def own(gm: GraphModule, program: Program) -> GraphModule:
    """Copy outputs that stand on the state's memory: another step may be given the state, and would write there."""
    root = roots(gm.graph)
    outputs = list(program.output.args[0])  # type: ignore[arg-type]
    inputs = set(program.placeholders)
    for k, value in enumerate(outputs):
        if root[value] in inputs:
            with gm.graph.inserting_before(program.output):
                outputs[k] = copy_of(value)
    program.output.args = (outputs,)
    return clean(gm)
