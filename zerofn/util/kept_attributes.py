"""The attributes of containers which those that are rebuilt have, too."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from types import MemberDescriptorType
from typing import Any

from .classes import bases_of, held_by, of_class
from .constants import is_constant, key_of

_NOTHING = object()


class Constants:
    """Constants by name, equal if a step cannot tell one from the other."""

    def __init__(self, values: dict[str, Any]) -> None:
        self.values = values
        self._keys = tuple((name, key_of(value)) for name, value in values.items())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Constants) and self._keys == other._keys

    def __hash__(self) -> int:
        return hash(self._keys)


@functools.cache
def _slots(kind: type) -> tuple[str, ...]:
    holders = map(held_by, bases_of(kind))
    return tuple(name for holder in holders for name, x in holder.items() if isinstance(x, MemberDescriptorType))


def own_names(x: Any) -> list[str]:
    """Return the names of what has been set on an object, in one order on all ranks, but for what a
    `functools.cached_property` can compute anew.
    """
    kind: Any = type(x)
    names = {*getattr(x, "__dict__", ()), *(name for name in _slots(kind) if hasattr(x, name))}
    return sorted(name for name in names if not isinstance(of_class(kind, name), functools.cached_property))


def is_pythons(name: str) -> bool:
    """Whether Python itself has set an attribute: `Box[int](x)` has an `__orig_class__`, a constant."""
    return name.startswith("__") and name.endswith("__")


def trees_and_constants(
    x: Any, names: Iterable[str], is_tree: Callable[[Any], bool]
) -> tuple[dict[str, Any], Constants]:
    """Return the attributes of these names that are trees, and those that are constants.

    What is neither is left out, such as a tokenizer's record of how it has split words: to read it is an
    `AttributeError`. Where the class would answer in its place it counts as a tree, whose leaves are refused.
    """
    kind: Any = type(x)
    values = {name: getattr(x, name) for name in names}
    constants = {name: value for name, value in values.items() if is_constant(value)}
    others = {name: value for name, value in values.items() if name not in constants}
    answered = {name for name in others if of_class(kind, name, _NOTHING) is not _NOTHING}
    return {n: value for n, value in others.items() if n in answered or is_tree(value)}, Constants(constants)
