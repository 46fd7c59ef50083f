"""Stages 1 and 2: a unit's gathered copy is waited for where it is first needed."""

from __future__ import annotations

import torch

from ..graph.alias import positions
from ..graph.edit import clean
from ..graph.program import Program


def wait_param_gather(program: Program) -> None:
    """Wait for every gathered copy that the step before may have left under way, just before the first node that uses
    it or the shard that lies in it: the end-of-step gather hides behind the next forward pass.
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
