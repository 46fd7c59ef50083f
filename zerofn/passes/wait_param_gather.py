"""Stages 1 and 2, and hpZ: wait for a unit's gathered copy at its first use."""

from __future__ import annotations

import torch

from ..graph.alias import positions
from ..graph.edit import clean
from ..graph.program import Program


def wait_param_gather(program: Program) -> None:
    """Insert a wait for every gathered copy before the first node that uses the copy or its shard.

    The previous step may have left the all-gather of the copy in flight (`start_param_gather`), so that it overlaps
    this step's forward pass. The pass runs after all others that move uses of parameters.
    """
    gm = program.gm
    where = positions(gm.graph)
    for shard, whole, _ in program.copies():
        users = [*whole.users, *shard.users]
        first = min(users, key=where.__getitem__, default=None)
        if first is not None and first.op != "output":
            with gm.graph.inserting_before(first):
                wait = gm.graph.call_function(torch.ops.zerofn.wait.default, (whole,))
            wait.meta["val"] = whole.meta.get("val")
    clean(gm)
