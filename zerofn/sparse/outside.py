"""What a user's function reads besides its arguments: if it changes, a layout that the function made is made again."""

from __future__ import annotations

import enum
import functools
import hashlib
import inspect
import sys
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from types import (
    BuiltinFunctionType,
    CodeType,
    FunctionType,
    MappingProxyType,
    MemberDescriptorType,
    MethodType,
    ModuleType,
)
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..util.by_identity import ByIdentity
from ..util.closures import closed_over
from ..util.constants import is_constant, key_of
from ..util.user_line import is_users

_CONTAINERS = (list, tuple, deque, dict, MappingProxyType, set, frozenset)
_NONE = object()
_PLAIN = (Tensor, torch.nn.Parameter, torch.nn.Buffer)
OF_STEP = (
    "sparse: the layout's function reads a tensor of the step. A function is evaluated once, by positions (head, "
    "query, key) alone; write sparse.documents(cu_seqlens), sparse.padding(mask) or sparse.chosen(index, block) for "
    "what differs from batch to batch."
)
_MANY = 1024  # entries of a container beyond which they are not compared
_BYTES = 1 << 20  # of an array, likewise


class Reads(NamedTuple):
    """What a function reads, as facts that can be compared. `complete`: whether equal facts mean an equal result."""

    facts: tuple[Any, ...]
    complete: bool


def read_outside(function: Any) -> Reads:
    """Return what a function reads: values of its closure, of globals and of defaults, and of their attributes that it
    names. Constants, containers of them and small arrays count by value, tensors by identity and number of writes, and
    other objects by identity and by the attributes that some code names.

    Raises `ValueError` for a function that reads a tensor of a step that is captured.

    >>> settings = {"window": 3}
    >>> before = read_outside(lambda head, query, key: query - key < settings["window"])
    >>> before.complete
    True
    """
    reading = _Reading()
    reading.value(function, frozenset({"__call__"}))
    return Reads(tuple(reading.facts), reading.complete)


class _Reading:
    """Facts, and whether they are all that a result depends on. `_seen`: what was read, by address and names; it is
    held, so that no other object gets its address.
    """

    def __init__(self) -> None:
        self.facts: list[Any] = []
        self.complete = True
        self._seen: dict[tuple[int, frozenset[str]], Any] = {}

    def value(self, x: Any, names: frozenset[str]) -> None:
        """Read a value. `names`: those of attributes that the code which has it may look up."""
        if isinstance(x, enum.Enum):  # by name: facts are also compared between ranks
            self.facts.append((type(x), x.name))
        elif is_constant(x):
            self.facts.append(key_of(x))
        elif isinstance(x, Tensor):
            self._tensor(x)
        elif (id(x), names) not in self._seen:
            self._seen[id(x), names] = x
            self._parts(x, names)

    def _all(self, values: Iterable[Any], names: frozenset[str]) -> None:
        for x in values:
            self.value(x, names)

    def _parts(self, x: Any, names: frozenset[str]) -> None:
        if isinstance(x, FunctionType):
            self.facts.append(ByIdentity(x))
            self._function(x)
        elif isinstance(x, functools.partial):
            self._all((x.func, x.args, x.keywords), names)
        elif isinstance(x, MethodType):
            self._method(x.__func__, x.__self__, names)
        elif isinstance(x, staticmethod | classmethod):
            self.value(x.__func__, names)
        elif isinstance(x, np.ndarray):
            self._array(x)
        elif type(x) in _CONTAINERS:
            self._container(x, names)
        elif isinstance(x, ModuleType | type):
            if _is_users(x):
                self._all((vars(x)[name] for name in sorted(names & vars(x).keys())), names)
                self.complete &= isinstance(x, ModuleType) or x.__bases__ == (object,)
        elif not isinstance(x, BuiltinFunctionType):
            self.facts.append(ByIdentity(x))
            self._object(x, names)

    def _function(self, x: FunctionType) -> None:
        names = frozenset(names_in(x.__code__))
        self._all((*closed_over(x).values(), *(x.__defaults__ or ()), *(x.__kwdefaults__ or {}).values()), names)
        if is_users(x.__code__.co_filename):
            self._all((x.__globals__[name] for name in sorted(names) if name in x.__globals__), names)

    def _method(self, function: Any, of: Any, names: frozenset[str]) -> None:
        code = getattr(function, "__code__", None)
        self.value(function, names)
        self.value(of, names | frozenset(names_in(code)) if isinstance(code, CodeType) else names)

    def _tensor(self, x: Tensor) -> None:
        if type(x) not in _PLAIN:
            raise ValueError(OF_STEP)
        self.facts.append(ByIdentity(x))
        if x.is_inference():  # torch does not count what is written to it
            self.complete = False
        else:
            self.facts.append(x._version)

    def _array(self, x: np.ndarray[Any, Any]) -> None:
        if x.nbytes > _BYTES or x.dtype.hasobject:
            self.complete = False
        else:
            self.facts.append((x.dtype.str, x.shape, hashlib.blake2b(x.tobytes()).hexdigest()))

    def _container(self, x: Any, names: frozenset[str]) -> None:
        self.facts.append((type(x), len(x)))
        if len(x) > _MANY:
            self.complete = False
        elif isinstance(x, set | frozenset):
            self.facts.append((type(x), *sorted(map(repr, x))))
            self.complete &= all(map(is_constant, x))
        elif isinstance(x, Mapping):
            self._entries([each for pair in x.items() for each in pair], names)
        else:
            self._entries(x, names)

    def _entries(self, x: Iterable[Any], names: frozenset[str]) -> None:
        """Read the entries of a container. It may be a batch, of whose tensors the function reads none."""
        for each in x:
            if isinstance(each, Tensor) and type(each) not in _PLAIN:
                self.complete = False
            else:
                self.value(each, names)

    def _object(self, x: Any, names: frozenset[str]) -> None:
        kind, own = type(x), getattr(x, "__dict__", {})
        computes = hasattr(kind, "__getattr__") or kind.__getattribute__ is not object.__getattribute__
        self.complete &= not hasattr(kind, "__getitem__") and not hasattr(kind, "__iter__")
        for name in sorted(names):
            found = own[name] if name in own else inspect.getattr_static(kind, name, _NONE)
            is_property = isinstance(found, property)
            if is_property:
                found = found.fget
            elif isinstance(found, MemberDescriptorType) or found is _NONE and computes:
                found = getattr(x, name, _NONE)
            if found is _NONE:
                continue
            self.facts.append((str, name))
            if name not in own and isinstance(found, FunctionType) and is_users(found.__code__.co_filename):
                self._method(found, x, names)
            elif name in own or not isinstance(found, FunctionType):
                self.value(found, names)
            elif is_property or name == "__call__":  # a library's: torch's of modules calls other methods
                self.complete = False


def _is_users(x: ModuleType | type) -> bool:
    name = x.__module__ if isinstance(x, type) else x.__name__
    file = getattr(sys.modules.get(name, None if isinstance(x, type) else x), "__file__", None)
    return name not in sys.builtin_module_names and is_users(file or "<interactive>")


def names_in(code: CodeType) -> Iterator[str]:
    """Yield the names of globals and attributes in a function's code, and in that of functions inside it."""
    yield from code.co_names
    for x in code.co_consts:
        if isinstance(x, CodeType):
            yield from names_in(x)
