"""Transformations and schedules as the code that makes them, with the names of their arguments."""

from __future__ import annotations

import functools
import inspect
import sys
from typing import Any


def as_code(name: str, args: tuple[Any, ...]) -> str:
    """Return a call of the function `name` of `zerofn.optim`, or of a function of the user's, without names.

    Arguments that are None are left out where names say which they are.
    """
    names = _names(name)
    if len(names) != len(args):
        return f"{name}({', '.join(map(_shown, args))})"
    return f"{name}({', '.join(f'{k}={_shown(x)}' for k, x in zip(names, args, strict=True) if x is not None)})"


@functools.cache
def _names(name: str) -> tuple[str, ...]:
    """Return the names of the arguments of one of our functions; none if it takes any number of them."""
    function = getattr(sys.modules[__package__], name, None)
    if not inspect.isfunction(function):
        return ()
    parameters = inspect.signature(function).parameters.values()
    several = any(x.kind is x.VAR_POSITIONAL for x in parameters)
    return () if several else tuple(x.name for x in parameters)


def _shown(x: Any) -> str:
    """Return an argument as Python code would write it; a function by its name."""
    return x.__qualname__.rpartition("<locals>.")[2] if inspect.isroutine(x) else repr(x)
