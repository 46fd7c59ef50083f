"""What functions close over."""

from __future__ import annotations

from types import CellType
from typing import Any

_EMPTY = CellType()  # compares equal to the cell of a variable without a value


def closed_over(function: Any) -> dict[str, Any]:
    """Return the variables of a function's closure, but those that have no value so far; none of other callables.

    >>> def outer(x):
    ...     def inner():
    ...         return x, later
    ...     return inner
    ...     later = 1
    >>> closed_over(outer(2))
    {'x': 2}
    """
    names = getattr(getattr(function, "__code__", None), "co_freevars", ())
    found = zip(names, getattr(function, "__closure__", None) or (), strict=True)
    return {name: cell.cell_contents for name, cell in found if cell != _EMPTY}
