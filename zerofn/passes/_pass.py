"""`Pass`: a transformation of a captured step, and the graphs that it works on."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, get_args

from torch.fx import GraphModule

from ..graph.nested import graphs_of
from ..graph.program import Program
from ..util.arguments import check_fields, known_fields
from ._context import context_of

Scope = Literal["step", "body"]


@dataclass(frozen=True)
class Body:
    """The body of a loop, as a pass with the scope "body" that takes a program meets it: its graph, `gm`."""

    gm: GraphModule

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"the body of a loop has no {name!r}: a pass with scope='body' may use only program.gm.")


@known_fields
@dataclass(frozen=True)
class Pass:
    """A transformation of a captured step: `fn(program) -> None` changes `program.gm`, an FX graph module, in place.

    `scope`: with "step", `fn` is called once. With "body", it is called for the step, then for the body of each loop
    (over microbatches), which has only the attribute `.gm`. A function of two arguments also receives a `Context` with
    the machine and the mesh: `fn(gm, context)` for "body", `fn(program, context)` for "step". `name`: the name in
    errors, timings and ZEROFN_DUMP's file names; by default the function's.

    The search for a schedule within `memory=` runs passes several times on copies. So a pass may change only the
    program that is its argument. `searched`: False if the search may skip the pass, because it changes neither memory
    nor time. `required`: whether results are wrong if the pass is left out or moved. `carries_out`: whether the pass
    applies the search's decisions about memory; the search runs before the first such pass.

    A pass must make the same changes on all ranks; ZeroFn compares only transfers. If a pass adds nodes that depend on
    a rank's own data, write `searched=False`: the search must see the same graph on all ranks, to choose one schedule.

    >>> from zerofn.passes import before
    >>> mine = Pass(lambda program: None, name="mine")
    >>> edit = before("donate", mine)  # for zerofn.compile(passes=edit)
    """

    fn: Callable[..., None]
    scope: Scope = "step"
    name: str = ""
    searched: bool = True
    required: bool = False
    carries_out: bool = False

    def __post_init__(self) -> None:
        if not callable(self.fn) or not (_takes(self.fn, 1) or _takes(self.fn, 2)):
            raise TypeError(
                f"Pass: fn must be a function of a program, not {self.fn!r}. A function of two arguments gets a "
                "context, too: (program, context), or with scope='body' (gm, context)."
            )
        if self.scope not in get_args(Scope):
            raise ValueError(f"Pass: scope={self.scope!r} is not known; expected 'step' or 'body'.")
        check_fields(self, "name", "searched", "required", "carries_out")
        if not self.name:
            object.__setattr__(self, "name", getattr(self.fn, "__name__", type(self.fn).__name__))

    def __call__(self, program: Program) -> list[Any]:
        """Apply the pass to every graph in its scope, and return what `fn` returned each time, which should be None."""
        bodies = graphs_of(program.gm)[1:] if self.scope == "body" else []
        if _takes(self.fn, 1):
            return [self.fn(program), *(self.fn(Body(gm)) for gm in bodies)]  # type: ignore[func-returns-value]
        context, first = context_of(program), program.gm if self.scope == "body" else program
        return [self.fn(first, context), *(self.fn(gm, context.of(gm)) for gm in bodies)]  # type: ignore[func-returns-value]


def _takes(fn: Callable[..., Any], num: int) -> bool:
    """Return whether a function can be called with this number of arguments; if it does not say, whether with one."""
    try:
        inspect.signature(fn).bind(*[None] * num)
    except TypeError:
        return False
    except ValueError:  # a builtin
        return num == 1
    return True


Edit = Callable[[list[Pass]], list[Pass]]


def edited(ours: list[Pass], edit: Edit) -> list[Pass]:
    """Return the list that the function given as `compile(passes=)` makes of the standard one.

    Raises `ValueError` if that is not a list of passes, or if a required one is missing or out of order.
    """
    found = edit(list(ours))
    if not isinstance(found, list | tuple):
        raise ValueError(
            "compile: the function given as passes= receives the list of all passes, and must return a list of passes, "
            f"but returned {found!r}."
        )
    for k, each in enumerate(found):
        if not isinstance(each, Pass):
            raise ValueError(
                f"compile: the function given as passes= returned a list whose item {k} is {each!r}, not a "
                "zerofn.Pass. Write zerofn.Pass(fn) instead of fn."
            )
    needed = [x for x in ours if x.required]
    kept = [x for x in found if x in needed]
    missing = [x.name for x in needed if x not in kept]
    if missing:
        raise ValueError(
            f"compile: the function given as passes= leaves out the pass {missing[0]!r}, without which results would "
            f"be wrong. Keep the passes {', '.join(x.name for x in needed)}, in this order."
        )
    if kept != needed:
        raise ValueError(
            "compile: the function given as passes= must keep each of these passes once, in this order: "
            f"{', '.join(x.name for x in needed)}. It returned them as {', '.join(x.name for x in kept)}."
        )
    return list(found)
