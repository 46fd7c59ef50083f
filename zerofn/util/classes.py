"""What classes hold. No metaclass is asked: one of the user's may answer every name."""

from __future__ import annotations

from collections.abc import Callable
from types import MappingProxyType
from typing import Any

bases_of: Callable[[type], tuple[type, ...]] = type.__dict__["__mro__"].__get__  # and the class itself, in order
named: Callable[[type], str] = type.__dict__["__name__"].__get__
held_by: Callable[[type], MappingProxyType[str, Any]] = type.__dict__["__dict__"].__get__


def of_class(kind: type, name: str, default: Any = None) -> Any:
    """Return what a class or the first of its bases holds under a name, as it is: a function, a property.

    >>> of_class(bool, "__add__") is int.__dict__["__add__"], of_class(bool, "some")
    (True, None)
    """
    return next((held_by(x)[name] for x in bases_of(kind) if name in held_by(x)), default)


def is_dataclass(kind: type) -> bool:
    """Return whether a class is a dataclass, or is derived from one."""
    return of_class(kind, "__dataclass_fields__") is not None


def made_by(kind: type) -> Any:
    """Return the `__new__` in C that instances of a class come from, whatever `__new__` it has of its own.

    >>> made_by(type("Bag", (dict,), {"__new__": lambda kind: None})) is dict.__new__
    True
    """
    found = (held_by(x)["__new__"] for x in bases_of(kind) if "__new__" in held_by(x))
    return next(x for x in found if not isinstance(x, staticmethod))
