"""What a user's function reads besides its arguments: if it changes, a layout that the function made is made again."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from types import CodeType, FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor

from ..util.by_identity import ByIdentity
from ..util.closures import closed_over

_SIMPLE = (int, float, complex, bool, str, bytes, type(None), torch.dtype, range)


def read_outside(function: Any) -> tuple[Any, ...]:
    """Return what a function reads: values of its closure, of globals and of defaults, and of their attributes that it
    names. Numbers and words count by value, tensors by identity and number of writes, and other objects by identity.

    Raises `ValueError` for a function that reads a tensor of a step that is captured.
    """
    return tuple(_facts(function, set()))


def _facts(function: Any, seen: set[int]) -> Iterator[Any]:
    if not isinstance(function, FunctionType):  # a method, or an object that can be called
        method = getattr(function, "__func__", None) or inspect.getattr_static(type(function), "__call__", None)
        yield from _of_object(getattr(function, "__self__", function), method, seen)
        return
    if id(function) in seen:
        return
    seen.add(id(function))
    names = set(names_in(function.__code__))
    own = [function.__globals__[x] for x in sorted(names) if x in function.__globals__]
    for value in (
        *closed_over(function).values(),
        *own,
        *(function.__defaults__ or ()),
        *(function.__kwdefaults__ or {}).values(),
    ):
        yield from _fact(value, names, seen)


def _of_object(x: Any, method: Any, seen: set[int]) -> Iterator[Any]:
    if isinstance(method, FunctionType):
        yield from _fact(x, set(names_in(method.__code__)), seen)
        yield from _facts(method, seen)


def _fact(value: Any, names: set[str], seen: set[int]) -> Iterator[Any]:
    if isinstance(value, _SIMPLE):
        yield type(value), value
    elif isinstance(value, Tensor):
        if type(value) not in (Tensor, torch.nn.Parameter):
            raise ValueError(
                "sparse: the layout's function reads a tensor of the step. A function is evaluated once, by positions "
                "(head, query, key) alone; write sparse.documents(cu_seqlens), sparse.padding(mask) or "
                "sparse.chosen(index, block) for what differs from batch to batch."
            )
        yield ByIdentity(value), value._version
    elif isinstance(value, tuple | list):
        for x in value:
            yield from _fact(x, names, seen)
    elif isinstance(value, FunctionType):
        yield ByIdentity(value)
        yield from _facts(value, seen)
    elif not isinstance(value, ModuleType | type):
        yield ByIdentity(value)
        own = getattr(value, "__dict__", {})
        yield from ((x, own[x]) for x in sorted(names) if isinstance(own.get(x, own), _SIMPLE))


def names_in(code: CodeType) -> Iterator[str]:
    """Yield the names of globals and attributes in a function's code, and in that of functions inside it."""
    yield from code.co_names
    for x in code.co_consts:
        if isinstance(x, CodeType):
            yield from names_in(x)
