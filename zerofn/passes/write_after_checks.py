"""Update the state only after every check that ranks agree."""

from __future__ import annotations

from torch.fx import Node

from ..capture.capture import CaptureError
from ..graph.node_kinds import in_place_of, traits
from ..graph.program import Program


def write_after_checks(program: Program) -> None:
    """Move updates, and what is computed from them, below the last check, so that a check that fails changes nothing.

    The pass runs before `donate` makes updates in-place. Raises `CaptureError` for a check of a value that is computed
    from the new state.
    """
    nodes = list(program.gm.graph.nodes)
    last = next((n for n in reversed(nodes) if traits(n).checks), None)
    if last is None:
        return
    after: dict[Node, None] = {}
    for node in nodes[: nodes.index(last) + 1]:
        if in_place_of(node.target) is not None or any(x in after for x in node.all_input_nodes):
            if traits(node).checks:
                raise CaptureError(
                    f"zerofn.same{node.meta.get('line', '')} checks a value that is computed from the new state, but "
                    "ranks are compared before the new state is written. Check a value of the batch or of the old "
                    "state instead."
                )
            after[node] = None
    for node in reversed(after):
        last.append(node)
