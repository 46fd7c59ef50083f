"""The kinds of values that a reading meets: what it follows by attributes, and what it tells apart by value."""

from __future__ import annotations

import argparse
import dataclasses
import enum
import functools
import types
from collections.abc import Mapping
from types import FunctionType, MethodType, ModuleType
from typing import Any, cast

from torch import Tensor, nn

from ..sharding.sharded import is_sharded
from .facts import NOTHING, Same
from .user_code import of_user

_MAKE = {"__init__", "__new__", "__post_init__"}
_NOT_CALLED_BY_STEPS = {
    *("__del__", "__repr__", "__str__", "__dir__", "__sizeof__", "__init_subclass__", "__class_getitem__"),
    "__set_name__",
    *("__reduce__", "__reduce_ex__", "__getstate__", "__setstate__", "__getnewargs__", "__copy__", "__deepcopy__"),
}
_WITH_VALUES = (str, bytes, float, complex, int)


def told_by_value(value: Any) -> tuple[str, Same, str] | None:
    """Return the token of an enum's member, or of a number or text of a class of its own; None for other values."""
    if isinstance(value, enum.Enum):
        return "value", Same(value), f"{type(value).__name__}.{value.name}"
    for kind in _WITH_VALUES:
        if isinstance(value, kind) and type(value) not in (kind, bool):
            return "value", Same(type(value)), f"{type(value).__name__}({kind.__repr__(value)})"
    return None


def own_attributes(value: Any) -> Mapping[str, Any]:
    """Return an object's `__dict__`, empty where it has none. Its `__getattr__` is not asked."""
    try:
        return cast(Mapping[str, Any], object.__getattribute__(value, "__dict__"))
    except AttributeError:
        return {}


def _classes_of(value: Any) -> tuple[type, ...]:
    """Where an object's attributes, or a class's, are looked for, in order."""
    return (value if isinstance(value, type) else type(value)).__mro__


def attributes_of(value: Any) -> set[str]:
    """Return the names of an object's attributes, its own and its classes'."""
    return {*own_attributes(value)}.union(*(kind.__dict__ for kind in _classes_of(value)))


def special_methods(value: Any) -> tuple[str, ...]:
    """Return the names of the special methods that a step may call of an object, or of what a class makes.

    Of the user's classes alone. A dataclass's comparisons are generated: its fields are read anyway.
    """
    found = {
        name
        for kind in _classes_of(value)
        if of_user(kind)
        for name, x in kind.__dict__.items()
        if name.startswith("__") and name.endswith("__") and callable(x) and (name in _MAKE or not _is_generated(x))
    }
    return tuple(sorted(found - _NOT_CALLED_BY_STEPS - (set() if isinstance(value, type) else _MAKE)))


def _is_generated(method: Any) -> bool:
    code = getattr(method, "__code__", None)
    return code is not None and code.co_filename == "<string>"


def held(cell: Any) -> Any:
    """Return what a closure's cell holds."""
    try:
        return cell.cell_contents
    except ValueError:  # empty
        return NOTHING


def shown(key: Any) -> str:
    """Return what a path calls a key."""
    return repr(key) if isinstance(key, str | int | float | bool | tuple) else f"{type(key).__name__} {id(key)}"


def is_config(value: Any) -> bool:
    """Whether all fields of an object are read: a dataclass, a namespace, or what calls itself a config."""
    kind = type(value)
    if isinstance(value, types.SimpleNamespace | argparse.Namespace):
        return True
    if is_sharded(value):
        return False
    return not isinstance(value, type) and (dataclasses.is_dataclass(value) or "config" in kind.__name__.lower())


def is_followed(value: Any) -> bool:
    """Whether attributes of a value are read one by one."""
    if isinstance(value, Tensor | FunctionType | MethodType | functools.partial):
        return False
    if isinstance(value, type | ModuleType):
        return of_user(value)
    return isinstance(value, nn.Module) or is_config(value) or of_user(type(value))
