"""Compute in bfloat16 with the upper half of the split master, which is already in memory."""

from __future__ import annotations

import torch
from torch.fx import GraphModule, Node

from ..graph.edit import clean
from ..graph.nested import calls, give
from ..graph.node_kinds import argument
from ._context import Context

ops = torch.ops.zerofn


def fold_split_master(gm: GraphModule, context: Context) -> None:
    """Replace `high(join(hi, lo))` by `hi`, in the step and in the bodies in it.

    A gather then sends the upper half from memory as it is, and nothing is joined or cast. The pass runs first: it
    looks for these operations as capture wrote them.
    """
    for user, call in calls(gm):
        for inside, given in call.given.items():
            if given.target is ops.join.default and all(x.target is ops.high.default for x in inside.users):
                _give(user, inside, given)
        clean(call.body)
    for node in list(gm.graph.nodes):
        if node.target is ops.high.default and argument(node, "p").target is ops.join.default:
            node.replace_all_uses_with(argument(argument(node, "p"), "hi"))
    clean(gm)


def _give(user: Node, inside: Node, joined: Node) -> None:
    """Pass the upper half instead of the joined number to a node whose body reads nothing else of it."""
    half = argument(joined, "hi")
    give(user, joined, half)
    inside.meta["val"] = half.meta["val"]
    for reader in list(inside.users):
        reader.replace_all_uses_with(inside)
