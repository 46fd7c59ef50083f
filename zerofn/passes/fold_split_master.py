"""What is computed with in bfloat16 is the upper half of a split master, which is there already."""

from __future__ import annotations

import torch
from torch.fx import GraphModule, Node

from ..graph.alias import given_to_body
from ..graph.edit import clean, give_to_loop, loops

ops = torch.ops.zerofn


def fold_split_master(gm: GraphModule) -> GraphModule:
    """`high(join(hi, lo))` is `hi`, in the step and in the bodies of its loops: a gather sends what lies in memory."""
    for loop, body in loops(gm):
        for inside, given in given_to_body(loop).items():
            if given.target is ops.join.default and all(x.target is ops.high.default for x in inside.users):
                _give(loop, inside, given)
        clean(body)
    for node in list(gm.graph.nodes):
        if node.target is ops.high.default and node.args[0].target is ops.join.default:
            node.replace_all_uses_with(node.args[0].args[0])
    return clean(gm)


def _give(loop: Node, inside: Node, joined: Node) -> None:
    """Give a loop's body the upper half instead of the joined number, of which it reads nothing else."""
    half = joined.args[0]
    give_to_loop(loop, joined, half)  # type: ignore[arg-type]
    inside.meta["val"] = half.meta["val"]  # type: ignore[union-attr]
    for reader in list(inside.users):
        reader.replace_all_uses_with(inside)
