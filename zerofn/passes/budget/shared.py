"""Decisions that all ranks take from the first one: about memory, and about the order of transfers."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import NamedTuple

from ...graph.program import Program
from ...job.agreement import agree_on, exchange, exchange_on
from .decision import Choice, as_text, from_text, names_of, order_of
from .search import graphs


class Decisions(NamedTuple):
    """`choices`: about memory, for each graph. `names`: which names these use, "" if there was nothing to choose.
    `orders`: of each graph's transfers, if a rank must take another's.
    """

    choices: Sequence[Choice] = ()
    names: str = ""
    orders: Sequence[list[int]] = ()

    def fits(self, program: Program) -> bool:
        """Whether the names mean the same in another prepared program."""
        return not self.names or names_of(graphs(program.gm)) == self.names


def shared(
    what: str,
    program: Program,
    decide: Callable[[], list[Choice]],
    order: Callable[[list[Choice]], list[list[int]]] | None,
) -> Decisions:
    """Return what all ranks take, of a program on which `decide` runs first. `order`: where ranks' batches differ, so
    that each would order its transfers in its own way; it returns this rank's. All ranks must call it.
    """
    choices = agree_on(what, lambda: (decide(), ""))
    names = ""
    if choices:
        names = names_of(graphs(program.gm))
        texts = exchange(what, f"{names}{_stage(program)} {as_text(choices)}")
        others, chosen = zip(*(text.split(" ", 1) for text in texts), strict=True)
        # ranks may differ by a few bytes: all use the choices of the first one to which names mean the same
        choices = from_text(chosen[others.index(f"{names}{_stage(program)}")])
    if order is None:
        return Decisions(choices, names)
    orders = exchange_on(what, lambda: json.dumps(order(choices)))
    return Decisions(choices, names, json.loads(orders[0]))


def _stage(program: Program) -> str:
    """Return the rank's place in a pipeline, each with decisions of its own."""
    return "" if program.mesh is None or program.mesh.stages.size == 1 else f"/{program.mesh.stages.rank}"


def orders_of(program: Program) -> list[list[int]]:
    """Return the order in which each graph of a scheduled program starts its transfers."""
    return [order_of(gm) or [] for gm in graphs(program.gm)]
