"""A captured graph twice: one to try a schedule on, one to keep."""

from __future__ import annotations

import copy

from torch.fx import GraphModule

from .._torch_compat import lazy_code
from .edit import loops


def copied(gm: GraphModule) -> GraphModule:
    """A graph of its own, with its loops' bodies; constants are the same tensors."""
    with lazy_code(True):
        new = GraphModule(gm, copy.deepcopy(gm.graph))
        new.meta.update(gm.meta)
        for node, body in loops(new):
            setattr(new, str(node.args[0].target), copied(body))  # type: ignore[union-attr]
    return new
