"""Values of context variables."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any, TypeVar

V = TypeVar("V")


@contextlib.contextmanager
def inside(variable: ContextVar[Any], value: V) -> Iterator[V]:
    """Inside, a variable has a value, which is also what `with` binds."""
    before = variable.set(value)
    try:
        yield value
    finally:
        variable.reset(before)
