"""What a step that donates nothing returns is its caller's own."""

from __future__ import annotations

from torch.fx import GraphModule, Node

from ..graph.alias import is_given, is_lent, roots
from ..graph.edit import clean, copy_of
from ..graph.program import Program


def own(gm: GraphModule, program: Program) -> GraphModule:
    """Copy outputs that stand on memory which was there before, or on that of an entry of the new state: another step
    may be given either state, and would write there; and those on memory that the next step uses again."""
    root = roots(gm.graph)
    outputs = list(program.output.args[0])  # type: ignore[arg-type]
    taken: set[Node] = set()
    for k, value in enumerate(outputs):
        if is_given(root[value]) or is_lent(root[value]) or root[value] in taken:
            with gm.graph.inserting_before(program.output):
                outputs[k] = copy_of(value)
        elif k < program.num_new:
            taken.add(root[value])
    program.output.args = (outputs,)
    return clean(gm)
