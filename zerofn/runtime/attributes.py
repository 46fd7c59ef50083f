"""The attributes of an object, and the values that a reading tells apart by themselves."""

from __future__ import annotations

import argparse
import dataclasses
import enum
import threading
import types
import weakref
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from functools import partial
from typing import Any, cast

from torch import Tensor

from ..sharding.sharded import is_sharded
from .contents import SUMMED
from .facts import NOTHING, Same
from .user_code import of_user

_MAKE = {"__init__", "__new__", "__post_init__"}
_NOT_CALLED_BY_STEPS = {
    *("__del__", "__repr__", "__str__", "__dir__", "__sizeof__", "__init_subclass__", "__class_getitem__"),
    "__set_name__",
    *("__reduce__", "__reduce_ex__", "__getstate__", "__setstate__", "__getnewargs__", "__copy__", "__deepcopy__"),
}
_WITH_VALUES = (str, bytes, float, complex, int)
_KEEP_FUNCTIONS = ("fget", "__func__", "func", "dispatcher", "__wrapped__")


def told_by_value(value: Any) -> tuple[str, Same, str] | None:
    """Return the token of an enum's member, or of a number or text of a class of its own; None for other values."""
    if isinstance(value, enum.Enum):
        return "value", Same(value), f"{type(value).__name__}.{value.name}"
    for kind in _WITH_VALUES:
        if isinstance(value, kind) and type(value) not in (kind, bool):
            return "value", Same(type(value)), f"{type(value).__name__}({kind.__repr__(value)})"
    return None


def own_attributes(value: Any) -> Mapping[str, Any]:
    """Return an object's `__dict__`, empty where it has none. No `__getattr__` of the user's is asked."""
    try:
        if isinstance(value, threading.local):  # of this thread
            return value.__dict__
        return cast(Mapping[str, Any], object.__getattribute__(value, "__dict__"))
    except AttributeError:
        return {}


def classes_of(value: Any) -> tuple[type[Any], ...]:
    """Where an object's attributes are looked for, in order. Those of a class are its own, then its metaclass's."""
    kind = type(value)
    return value.__mro__ + kind.__mro__ if isinstance(value, type) else kind.__mro__


def attributes_of(value: Any) -> set[str]:
    """Return the names of an object's attributes, its own and its classes'."""
    return {*own_attributes(value), *(name for kind in classes_of(value) for name in kind.__dict__)}


def special_methods(value: Any) -> set[str]:
    """Return the names of the special methods that a step may call of an object, or of what a class makes.

    Of the user's classes alone. A dataclass's comparisons are generated: its fields are read anyway.
    """
    found = {
        name
        for kind in classes_of(value)
        if of_user(kind)
        for name, x in kind.__dict__.items()
        if name.startswith("__") and name.endswith("__") and callable(x) and (name in _MAKE or not _is_generated(x))
    }
    return found - _NOT_CALLED_BY_STEPS - (set() if isinstance(value, type) else _MAKE)


def functions_in(found: Any) -> list[types.FunctionType]:
    """Return the functions that a class's attribute runs: a method itself, what a property or another of Python's
    descriptors keeps.
    """
    if isinstance(found, types.FunctionType):
        return [found]
    if of_user(type(found)):
        return []
    kept = [getattr(found, name, None) for name in _KEEP_FUNCTIONS]
    return [*dict.fromkeys(x for x in kept if isinstance(x, types.FunctionType))]


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
    return repr(key) if isinstance(key, str | bytes | int | float | bool | tuple) else f"{type(key).__name__} {id(key)}"


def referred(value: Any) -> Any:
    """Return what a weak reference refers to. A tensor is kept elsewhere, and read there: recurrent networks refer anew
    to the parameters of each call, of which nothing is left.
    """
    if not isinstance(value, weakref.ReferenceType):
        return value
    held = value()
    return "a weak reference" if held is None or isinstance(held, Tensor) else held


def shows(value: Any) -> Callable[[], Any] | None:
    """Return a function that gives what an object written in C holds; None if nothing does."""
    if isinstance(value, ContextVar):
        return partial(value.get, NOTHING)
    for name in ("__self__", "mapping", "obj"):  # of methods in C, views of dicts, memoryviews
        if (x := getattr(value, name, None)) is not None and not isinstance(x, types.ModuleType):
            return partial(getattr, value, name)
    if isinstance(value, Mapping) and not is_sharded(value):
        return lambda: tuple(value.items())
    try:
        return partial(bytes, value) if memoryview(value).nbytes <= SUMMED else None
    except TypeError:  # it shows no memory
        return None


def is_config(value: Any) -> bool:
    """Whether all fields of an object are read: a dataclass, a namespace, or what calls itself a config."""
    kind = type(value)
    if isinstance(value, types.SimpleNamespace | argparse.Namespace):
        return True
    if is_sharded(value) or isinstance(value, type):
        return False
    return dataclasses.is_dataclass(value) or "config" in kind.__name__.lower()
