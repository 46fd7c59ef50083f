"""Compute in bfloat16 with the upper half of the split master, which is already in memory."""

from __future__ import annotations

import torch
from torch.fx import Node

from ..graph.edit import clean, give_to_loop, loops
from ..graph.loop import given_to_body
from ..graph.node_kinds import argument
from ..graph.program import Program

ops = torch.ops.zerofn


def fold_split_master(program: Program) -> None:
    """Replace `high(join(hi, lo))` by `hi`, in the step and in the bodies of its loops.

    A gather then sends the upper half from memory as it is, and nothing is joined or cast. The pass runs first: it
    looks for these operations as capture wrote them.
    """
    gm = program.gm
    for loop, body in loops(gm):
        for inside, given in given_to_body(loop).items():
            if given.target is ops.join.default and all(x.target is ops.high.default for x in inside.users):
                _give(loop, inside, given)
        clean(body)
    for node in list(gm.graph.nodes):
        if node.target is ops.high.default and argument(node, "p").target is ops.join.default:
            node.replace_all_uses_with(argument(argument(node, "p"), "hi"))
    clean(gm)


def _give(loop: Node, inside: Node, joined: Node) -> None:
    """Pass the upper half instead of the joined number to a loop whose body reads nothing else of it."""
    half = argument(joined, "hi")
    give_to_loop(loop, joined, half)
    inside.meta["val"] = half.meta["val"]
    for reader in list(inside.users):
        reader.replace_all_uses_with(inside)
