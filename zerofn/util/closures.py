"""What functions close over."""

from __future__ import annotations

from types import CellType, FunctionType
from typing import Any

_EMPTY = CellType()  # compares equal to the cell of a variable without a value


def closed_over(function: FunctionType) -> list[Any]:
    """Return the values of a function's closure, without variables that have no value so far.

    >>> def outer(x):
    ...     def inner():
    ...         return x, later
    ...     return inner
    ...     later = 1
    >>> closed_over(outer(2))
    [2]
    """
    return [cell.cell_contents for cell in function.__closure__ or () if cell != _EMPTY]
