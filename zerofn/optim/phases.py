"""Optimizers whose steps are of several kinds, one after the other.

After some number of updates 1-bit Adam sends codes instead of gradients: another step, with other transfers, and so
another capture. Its state names the kind, in a word that is part of the treedef. The word follows from the count of
applied updates, and changes between two steps, on the host; nothing else of the state changes with it.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any, ClassVar, NamedTuple

from torch import Tensor

from .. import tree
from .._torch_compat import FakeTensor, current_trace
from .base import GradientTransformation

EXACT, CODED = "exact", "coded"


class Phase(NamedTuple):
    """The kind of the next steps. `left`: for how many applied updates; None for all."""

    kind: str
    left: int | None = None


class PhasedState:
    """A state whose treedef names the kind of its step. `count`: applied updates, int64 scalar. `phase`: the kind."""

    count: Tensor
    phase: str
    apart: ClassVar[frozenset[str]] = frozenset((CODED,))  # kinds for which gradients are not added over ranks


def phased(opt_state: Any) -> Any:
    """Return the part of an optimizer's state that is a `PhasedState`; None if there is none."""
    return next((x for x in tree.leaves(opt_state, is_leaf=_is_phased) if _is_phased(x)), None)


def _is_phased(x: Any) -> bool:
    return isinstance(x, PhasedState)


def takes_apart(tx: GradientTransformation, opt_state: Any) -> bool:
    """Return whether a transformation wants the gradients of the next step as each rank has them, before their sum."""
    if tx.about.phase is None:
        return False
    found = phased(opt_state)
    return found is not None and found.phase in found.apart


class Kinds(NamedTuple):
    """The kinds of steps of an optimizer: how many there are of each among the first `until` applied updates, and the
    kind of all later ones.
    """

    before: dict[str, int]
    until: int
    last: str


def kinds_of(tx: GradientTransformation) -> Kinds | None:
    """Return the kinds of steps of an optimizer; None if it has one."""
    if tx.about.phase is None:
        return None
    before, count = Counter[str](), 0
    while True:
        kind, left = tx.about.phase(count)
        if left is None:
            return Kinds(dict(before), count, kind)
        before[kind] += left
        count += left


def turned_to(opt_state: Any, kind: str) -> Any:
    """Return the state for a step of one kind."""
    return tree.tree_map(lambda x: replace(x, phase=kind) if _is_phased(x) else x, opt_state, is_leaf=_is_phased)


def turned(tx: GradientTransformation, opt_state: Any) -> tuple[Any, int | None]:
    """Return (the state for the next step, for how many updates it need not be looked at again). It reads the count.

    Inside of a capture, and on a fake machine, a state stays as it is.
    """
    found = None if tx.about.phase is None else phased(opt_state)
    if found is None or current_trace() is not None or isinstance(found.count, FakeTensor) or found.count.is_meta:
        return opt_state, None
    assert tx.about.phase is not None
    kind, left = tx.about.phase(int(found.count))
    if kind == found.phase:
        return opt_state, left
    return turned_to(opt_state, kind), left
