"""A captured graph twice: one to try a schedule on, one to keep."""

from __future__ import annotations

import copy

from torch.fx import GraphModule

from .._torch_compat import LazyGraphModule
from .edit import loops


def copied(gm: GraphModule) -> GraphModule:
    """A graph of its own, with its loops' bodies; constants are the same tensors."""
    new = LazyGraphModule(gm, copy.deepcopy(gm.graph))
    new.meta.update(gm.meta)
    for node, body in loops(new):
        setattr(new, str(node.args[0].target), copied(body))  # type: ignore[union-attr]
    return new
