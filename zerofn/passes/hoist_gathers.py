"""Stage 3: gather a unit once before the microbatches, instead of once in each of them."""

from __future__ import annotations

from torch.fx import Node

from ..graph.edit import clean, weight_chain
from ..graph.nested import Call, call_of, calls, graphs_of, pass_in
from ..graph.node_kinds import is_gather, wait_of
from ..graph.program import Program
from ._context import Context


def hoist_gathers(program: Program, context: Context) -> None:
    """Gather, before a loop, the units that the decisions about its body name. They stay whole through all rounds.

    A gather in a loop in a loop moves out of the inner one.
    """
    for gm in graphs_of(program.gm):
        for node, call in list(calls(gm)):
            names = context.of(call.body).choice.hoisted
            for start, chain in hoistable(call).items():
                if start.name in names:
                    _hoist(node, start, chain)
            clean(call.body)
        clean(gm)


def hoistable(call: Call) -> dict[Node, list[Node]]:
    """Return the gathers in a body that send the same in every round, in order, and the nodes that read, decode or cast
    what they send.
    """
    before: dict[Node, dict[Node, None]] = {x: {} for x in call.whole}
    for node in weight_chain(call.body.graph):
        inputs = node.all_input_nodes
        if all(x in before for x in inputs):
            before[node] = {y: None for x in inputs for y in (*before[x], x) if y.op != "placeholder"}
    return {x: list(chain) for x, chain in before.items() if x.op != "placeholder" and is_gather(x)}


def _hoist(node: Node, start: Node, chain: list[Node]) -> None:
    """Move a gather to before the node that runs its body, and pass it the gathered unit."""
    call = call_of(node)  # as it is by now
    assert call is not None
    wait, outside = wait_of(start), dict(call.given)
    with node.graph.inserting_before(node):
        for each in (*chain, start, wait):
            outside[each] = node.graph.node_copy(each, outside.__getitem__)
    wait.replace_all_uses_with(pass_in(node, call, outside[wait]))
    call.body.graph.erase_node(wait)
    call.body.graph.erase_node(start)
