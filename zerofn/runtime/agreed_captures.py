"""What all ranks have agreed on of a step's captures, so that a rank may capture the step for another batch alone.

Ranks' batches may have other sizes, as where each rank pads to its own longest row. A rank that meets new sizes needs a
capture at a step at which others need none, and could not meet them. It makes one alone, and uses it if an agreed one
says the same of all that ranks have in common: what their Python reads, what meets the state, and which transfers
start, in which order. Everything else is of a rank's own rows. If none does, all ranks must meet again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from itertools import zip_longest
from typing import Any, NamedTuple

from ..capture.between_ranks import NumberedStep
from ..guards.tensors import Contents
from ..guards.tokens import Facts, changed_paths, without

KEPT = 8  # agreed steps of one function, the newest first: each is some texts, and the same on every rank


class AgreedStep(NamedTuple):
    """What all ranks have agreed on of one capture. `inputs`, `text`: see `rank_comparison.py`. `told`: the numbers of
    values that are not a rank's own. `first`: the decisions by which it was scheduled (`passes/budget/shared.py`).
    """

    inputs: str
    text: str
    told: dict[str, set[int]]
    first: Any

    def difference(self, inputs: str, numbered: NumberedStep) -> str:
        """Return how a capture differs in what ranks have in common, or "". Sizes of the batch may be others."""
        told = numbered.told()
        if inputs != self.inputs or told.keys() != self.told.keys():
            return first_change(self.inputs, inputs) or "its mesh is another one"
        common = {axis: numbers & told[axis] for axis, numbers in self.told.items() if numbers != told[axis]}
        return numbered.difference(common, {})


class Reading(NamedTuple):
    """What a step depends on: the state's signature, facts with those paths that are `unsure`, and constants."""

    state: Any
    facts: Facts
    unsure: frozenset[str]
    constants: Contents | None = None


class AgreedSteps:
    """The agreed captures of one step, the newest first."""

    def __init__(self) -> None:
        self._kept: deque[tuple[AgreedStep, Reading]] = deque(maxlen=KEPT)

    def add(self, agreed: AgreedStep, reading: Reading) -> None:
        """Keep one, with what it depends on. All ranks call it at the same step."""
        self._kept.appendleft((agreed, reading))

    def of(self, now: Reading, left_out: Iterable[str]) -> Iterator[AgreedStep]:
        """Yield those that depend on what there is now. `left_out`: paths that no capture depends on."""
        for agreed, before in self._kept:
            if before.state == now.state and (before.constants is None or before.constants.hold()):
                changed = changed_paths(without(before.facts, left_out), without(now.facts, left_out))
                if before.unsure.union(now.unsure).issuperset(changed):
                    yield agreed


def first_change(before: str, now: str) -> str:
    """Return the first line that changed of a text, or "".

    >>> first_change("a: 1\\nb: 2", "a: 1\\nb: 3")
    'b: 2 is b: 3 now'
    """
    lines = zip_longest(before.split("\n"), now.split("\n"), fillvalue="nothing")
    return next((f"{a} is {b} now" for a, b in lines if a != b), "")
