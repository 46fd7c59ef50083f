"""`zerofn.copy`: a state twice."""

from __future__ import annotations

import copy as standard
from typing import TypeVar

from ..memory.turns import outside_steps

T = TypeVar("T")


@outside_steps("zerofn.copy")
def copy(state: T) -> T:
    """Return a copy of a state, or of any tree, that shares no memory with it.

        kept = zerofn.copy(state)
        state, metrics = step(state, batch)  # may be tried again from `kept`

    A compiled step writes the new state into the memory of its argument. So in a notebook cell that you run more than
    once, pass a copy to the step, or write `compile(..., donate=False)`. Each rank copies its own shards; nothing is
    sent, and any rank may call it alone. The copy needs as much memory as the state.

    Raises `RuntimeError` for a state that was donated, and for one that is on a drive.

    >>> import torch
    >>> before = {"w": torch.ones(2)}
    >>> after = copy(before)
    >>> after["w"].add_(1), before["w"]
    (tensor([2., 2.]), tensor([1., 1.]))
    """
    return standard.deepcopy(state)
