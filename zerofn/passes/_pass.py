"""`Pass`: a transformation of a captured step, and the graphs that it works on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, get_args

from ..graph.nested import graphs_of
from ..graph.program import Program
from ..util.arguments import check_fields

Scope = Literal["step", "body"]


@dataclass(frozen=True)
class Pass:
    """A transformation of a captured step: `fn(program) -> None` changes `program.gm`, an FX graph module, in place.

    `scope`: "step": `fn` is called once. "body": it is called for the step, then for the body of each of its loops
    (microbatches). During the latter calls `program.gm` is the body, and `fn` may use nothing else of the program.
    `name`: in errors, timings and ZEROFN_DUMP's file names; the function's by default.

    The search for a schedule within `memory=` runs passes several times on copies. So a pass changes the program that
    it is called with and nothing else. `searched`: False for one that the search leaves out, since it changes neither
    memory nor time, or what it does differs by rank, as the decisions of all must not. `required`: without it, or in
    another order, results are wrong. `carries_out`: it does what was decided about memory; the first such pass ends
    what runs before the decisions.
    """

    fn: Callable[[Program], None]
    scope: Scope = "step"
    name: str = ""
    searched: bool = True
    required: bool = False
    carries_out: bool = False

    def __post_init__(self) -> None:
        if not callable(self.fn):
            raise TypeError(f"Pass: fn must be a function of a program, not {self.fn!r}.")
        if self.scope not in get_args(Scope):
            raise ValueError(f"Pass: scope={self.scope!r} is not known; there are 'step' and 'body'.")
        check_fields(self, "name", "searched", "required", "carries_out")
        if not self.name:
            object.__setattr__(self, "name", getattr(self.fn, "__name__", type(self.fn).__name__))

    def __call__(self, program: Program) -> list[Any]:
        """Apply the pass to every graph in its scope, and return what `fn` returned each time, which should be None."""
        returned = [self.fn(program)]  # type: ignore[func-returns-value]
        if self.scope == "body":
            returned += [self.fn(program.inside(body)) for body in graphs_of(program.gm)[1:]]  # type: ignore[func-returns-value]
        return returned


Edit = Callable[[list[Pass]], list[Pass]]


def edited(ours: list[Pass], edit: Edit) -> list[Pass]:
    """Return the list that the function given as `compile(passes=)` makes of the standard one.

    Raises `ValueError` if that is no list of passes, or if a required one is missing or out of order.
    """
    found = edit(list(ours))
    if not isinstance(found, list | tuple):
        raise ValueError(
            f"compile: passes= is a function that takes the list of passes and returns one; it returned {found!r}."
        )
    for k, each in enumerate(found):
        if not isinstance(each, Pass):
            raise ValueError(f"compile: passes= returned {each!r} as item {k} of its list; write zerofn.Pass(fn).")
    needed = [x for x in ours if x.required]
    kept = [x for x in found if x in needed]
    missing = [x.name for x in needed if x not in kept]
    if missing:
        raise ValueError(
            f"compile: passes= leaves out {missing[0]!r}, without which results would be wrong. Keep the passes named "
            f"{', '.join(x.name for x in needed)}, in this order."
        )
    if kept != needed:
        raise ValueError(
            f"compile: passes= must keep {', '.join(x.name for x in needed)} once each, in this order; "
            f"it returned {', '.join(x.name for x in kept)}."
        )
    return list(found)
