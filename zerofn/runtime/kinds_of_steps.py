"""Which kind of step a state comes to, where its optimizer has several: seen on the host, before the step is chosen."""

from __future__ import annotations

import weakref
from dataclasses import replace
from typing import Any

from torch import Tensor

from .. import tree
from ..optim import phases
from ..optim.phases import Kinds, phased, turned
from ..sharding.sharded import is_sharded
from ..training.train_state import TrainState


class KindsOfSteps:
    """Looks at counts of updates, which lie on the device, as seldom as it can: a count that a step has returned is one
    more at most than the one that it was given.
    """

    def __init__(self) -> None:
        self._left: dict[int, tuple[weakref.ref[Tensor], int | None]] = {}  # by the number of the `TrainState`

    def turned(self, state: Any) -> Any:
        """Return a state with its optimizers' states turned to the step that comes."""
        if isinstance(state, TrainState):
            return self._turned(0, state)
        nodes, treedef = tree.flatten(state, _is_end)
        if not any(isinstance(x, TrainState) and x.tx.about.phase is not None for x in nodes):
            return state
        return tree.unflatten(
            treedef, [self._turned(k, x) if isinstance(x, TrainState) else x for k, x in enumerate(nodes)]
        )

    def went(self, state: Any) -> None:
        """Note what a step has made of the state that was turned last."""
        if not self._left:
            return
        nodes = [state] if isinstance(state, TrainState) else tree.flatten(state, _is_end)[0]
        for k, x in enumerate(nodes):
            if k in self._left and isinstance(x, TrainState):
                _, left = self._left[k]
                self._left[k] = weakref.ref(phased(x.opt_state).count), left if left is None else left - 1

    def _turned(self, k: int, state: TrainState) -> TrainState:
        found = None if state.tx.about.phase is None else phased(state.opt_state)
        if found is None:
            return state
        known, left = self._left.get(k, (None, 0))
        if known is not None and known() is found.count and (left is None or left > 0):
            return state
        opt_state, left = turned(state.tx, state.opt_state)
        self._left[k] = weakref.ref(found.count), left
        return state if opt_state is state.opt_state else replace(state, opt_state=opt_state)


def kinds_of(state: Any) -> Kinds | None:
    """Return the kinds of steps of the first optimizer in a state that has several; None if none has."""
    nodes = tree.flatten(state, _is_end)[0]
    return next((kinds for x in nodes if isinstance(x, TrainState) and (kinds := phases.kinds_of(x.tx))), None)


def with_kind(state: Any, kind: str) -> Any:
    """Return a state with all optimizers that have several kinds of steps turned to one."""

    def one(x: Any) -> Any:
        if not isinstance(x, TrainState) or x.tx.about.phase is None:
            return x
        return replace(x, opt_state=phases.turned_to(x.opt_state, kind))

    return tree.tree_map(one, state, is_leaf=_is_end)


def _is_end(x: Any) -> bool:
    return isinstance(x, TrainState) or is_sharded(x)
