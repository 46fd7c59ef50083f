"""The attributes of an object, and the values that a reading tells apart by themselves."""

from __future__ import annotations

import argparse
import contextlib
import enum
import threading
import types
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextvars import ContextVar
from functools import partial
from itertools import chain
from typing import Any, cast

import torch
from torch import Tensor

from ..sharding.sharded import is_sharded
from ..util.by_identity import ByIdentity
from ..util.classes import bases_of, held_by, is_dataclass, named
from .tensors import SUMMED
from .tokens import NOTHING, plain
from .user_code import of_user

_MAKE = {"__init__", "__new__", "__post_init__"}
_WITH_VALUES = (str, bytes, float, complex, int)
_PARTS = ("fget", "__func__", "func", "args", "keywords", "dispatcher", "__wrapped__")


def told_by_value(value: Any) -> tuple[str, ByIdentity, str] | None:
    """Return the token of an enum's member, of an operation, or of a number or text of a class of its own; None for
    other values.
    """
    if isinstance(value, torch.library.CustomOpDef):  # it keeps what its first call made, on ranks that call it
        return "value", ByIdentity(value), "an operation"
    if isinstance(value, enum.Enum):
        return "value", ByIdentity(value), f"{type(value).__name__}.{value.name}"
    for kind in _WITH_VALUES:
        if isinstance(value, kind) and type(value) not in (kind, bool):
            return "value", ByIdentity(type(value)), f"{type(value).__name__}({kind.__repr__(value)})"
    return None


def own_attributes(value: Any) -> Mapping[str, Any]:
    """Return an object's `__dict__`, empty where it has none. No `__getattr__` of the user's is asked."""
    try:
        if isinstance(value, threading.local):  # of this thread
            return value.__dict__
        return cast(Mapping[str, Any], object.__getattribute__(value, "__dict__"))
    except AttributeError:
        return {}


def plain_attributes(value: Any) -> list[str]:
    """Return the names of a library's object's own attributes that are plain: below the others is half of Python."""
    own = {} if isinstance(value, type | types.ModuleType) else own_attributes(value)
    return [name for name, x in own.items() if plain(x) is not None]


def classes_of(value: Any) -> tuple[type[Any], ...]:
    """Where an object's attributes are looked for, in order. Those of a class are its own, then its metaclass's."""
    kind = type(value)
    return bases_of(value) + bases_of(kind) if isinstance(value, type) else bases_of(kind)


def attributes_of(value: Any) -> set[str]:
    """Return the names of an object's attributes, its own and its classes'."""
    return {*own_attributes(value), *(name for kind in classes_of(value) for name in held_by(kind))}


def _in_users(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield what the user's classes give an object, or what a module has, by name."""
    holders = [vars(value)] if isinstance(value, types.ModuleType) else map(held_by, filter(of_user, classes_of(value)))
    return chain.from_iterable(holder.items() for holder in holders)


def names_of(value: Any) -> set[str]:
    """Return the names of the attributes that the user's classes give an object, or that a module has."""
    return {name for name, _ in _in_users(value) if not name.startswith("__")}


def special_methods(value: Any) -> set[str]:
    """Return the names of the special methods that a step may call of an object, or of what a class makes.

    Of the user's classes alone, and of modules. A dataclass's comparisons are generated: its fields are read anyway.
    """
    found = {
        name
        for name, x in _in_users(value)
        if name[:2] == name[-2:] == "__" and callable(x)
        if name in _MAKE or getattr(getattr(x, "__code__", None), "co_filename", "") != "<string>"
    }
    return found if isinstance(value, type) else found - _MAKE


def parts_of(found: Any) -> dict[str, Any]:
    """Return the functions that a class's attribute runs, and what it runs them with, by name: a method itself, what a
    property, a partial or another of Python's descriptors keeps.
    """
    if isinstance(found, types.FunctionType):
        return {"": found}
    if of_user(type(found)) or isinstance(found, type | types.ModuleType):
        return {}
    names = attributes_of(found)
    kept = {f".{name}": getattr(found, name) for name in _PARTS if name in names}
    return kept if any(callable(x) for x in kept.values()) else {}


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
        with contextlib.suppress(Exception):  # what a `__getattr__` of a library raises for any name
            if (x := getattr(value, name, None)) is not None and not isinstance(x, types.ModuleType):
                return partial(getattr, value, name)
    if isinstance(value, Mapping) and not is_sharded(value):
        return lambda: tuple(value.items())
    try:
        return partial(bytes, value) if memoryview(value).nbytes <= SUMMED else None
    except TypeError:  # it shows no memory
        return None


def answers(kinds: Iterable[type], opened: Iterable[tuple[Any, str, Any]]) -> dict[str, Any]:
    """Return what abstract classes and protocols say of objects: of those, what is registered with one."""
    found = {}
    for kind in kinds:
        for value, path, _ in opened:
            ask = issubclass if isinstance(value, type) else isinstance
            with contextlib.suppress(Exception):  # it cannot be asked
                found[f"{path}: a {named(kind)}"] = plain(ask(value, kind))
    return found


def is_config(value: Any) -> bool:
    """Whether all fields of an object are read: a dataclass, a namespace, or what calls itself a config."""
    if is_sharded(value) or isinstance(value, type):
        return False
    kind = type(value)
    is_named = is_dataclass(kind) or "config" in named(kind).lower()
    return is_named or isinstance(value, types.SimpleNamespace | argparse.Namespace)
