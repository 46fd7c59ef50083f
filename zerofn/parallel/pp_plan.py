"""A model's own plan of a pipeline, `pp_plan`: the names of the modules of which stages consist."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from torch import nn

from ..util.errors import nearest


class PpPlan(NamedTuple):
    """The names in a plan, with a dot after each name. `lists`: names of lists of modules, each of which is a block;
    `modules`: names of modules that are a block each.
    """

    lists: tuple[str, ...]
    modules: tuple[str, ...]

    def item(self, leaf: str) -> str | None:
        """Return the block of a list that a parameter is in."""
        found = _longest(self.lists, leaf)
        return found and found + leaf[len(found) :].partition(".")[0]

    def module(self, leaf: str) -> str | None:
        """Return the module that a parameter is in, if it is a block."""
        return _longest(self.modules, leaf).removesuffix(".") or None


def pp_plan_of(model: nn.Module) -> PpPlan | None:
    """Return the plan of a model from `pp_plan` or `_pp_plan`, or the plans of modules inside it; None if it has none.

    A plan maps names of modules to their inputs and outputs, as in models of transformers; we read only the names.
    Raises `ValueError` for a name without a module.
    """
    lists: list[str] = []
    modules: list[str] = []
    for path, owner, names in _plans(model):
        there = dict(owner.named_modules())
        for name in names:
            if name not in there:
                near = nearest(str(name), [x for x in there if x], 1)
                hint = f"; did you mean {near[0]!r}?" if near else "."
                raise ValueError(
                    f"pipe: the pp_plan of {type(owner).__name__} names {name!r}, but the model has no such "
                    f"module{hint} Correct model.pp_plan, a dict whose keys are the names of the modules to split "
                    "into stages."
                )
            (lists if isinstance(there[name], nn.ModuleList) else modules).append(f"{path}{name}.")
    return PpPlan(tuple(lists), tuple(modules)) if lists or modules else None


def _plans(model: nn.Module) -> Iterator[tuple[str, nn.Module, Iterable[str]]]:
    """Yield (path, module, plan) of the outermost modules with their own plan. A wrapper passes attributes on, so its
    plan may hold names that are not those of its own modules.
    """
    found: list[str] = []
    for path, module in model.named_modules():
        if any(f"{path}.".startswith(x) for x in found):
            continue
        known = (x for x in ("pp_plan", "_pp_plan") if x in vars(module) or hasattr(type(module), x))
        if plan := next(filter(None, (getattr(module, x) for x in known)), None):
            found.append(path and f"{path}.")
            yield found[-1], module, plan


def _longest(names: Iterable[str], leaf: str) -> str:
    return max((x for x in names if leaf.startswith(x)), key=len, default="")
