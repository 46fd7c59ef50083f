"""The places that facts were read from, and a fast check that they hold the same objects as then.

A model of a thousand modules has some ten thousand places, which are looked at before every step. So all places that
are read in one way make one column, and Python's C code reads and compares all columns in one go.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from itertools import chain
from operator import attrgetter, contains, is_, itemgetter
from types import FunctionType
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

from ..util.classes import bases_of, held_by
from .tensors import Contents
from .tokens import plain

_item, _attribute = functools.cache(itemgetter), functools.cache(attrgetter)


class HeldObjects:
    """Places with the objects that they held when they were noted. `hold` says whether they still do."""

    def __init__(self) -> None:
        self._columns: dict[Callable[[Any], Any], tuple[list[Any], list[Any]]] = {}  # way -> (holders, values)
        self._absent: tuple[list[Any], list[str]] = ([], [])  # dicts, and the key that each lacks
        self._classes: set[int] = set()
        self._views: list[Any] = []
        self._sized: list[Any] = []
        self._tensors: list[Any] = []
        self._computed: list[tuple[Callable[[], Any], Any]] = []
        self._hold: Callable[[], bool] = lambda: False

    def item(self, holder: Any, key: str, value: Any) -> None:
        """Note `holder[key]`."""
        self.given(_item(key), holder, value)

    def attribute(self, holder: Any, name: str, value: Any) -> None:
        """Note `holder.name`."""
        self.given(_attribute(name), holder, value)

    def given(self, way: Callable[[Any], Any], holder: Any, value: Any) -> None:
        """Note `way(holder)`."""
        holders, values = self._columns.setdefault(way, ([], []))
        holders.append(holder)
        values.append(value)

    def absent(self, holder: Any, key: str) -> None:
        """Note that a dict lacks a key."""
        self._absent[0].append(holder)
        self._absent[1].append(key)

    def classes(self, kinds: Iterable[type]) -> None:
        """Note classes' bases, and how much they hold: what is new there may come before what is found now."""
        for kind in kinds:
            if id(kind) not in self._classes:  # one of the user's may not be hashable
                self._classes.add(id(kind))
                self.given(bases_of, kind, bases_of(kind))
                self.length(held_by(kind))

    def contents(self, view: Any) -> None:
        """Note the entries of a list, or of the live view of a dict."""
        self._views.append(view)

    def function(self, function: FunctionType) -> None:
        """Note a function's code and defaults."""
        for name in ("__code__", "__defaults__", "__kwdefaults__"):
            self.attribute(function, name, getattr(function, name))

    def module(self, module: nn.Module) -> None:
        """Note a module's class, the number of its attributes, its parameters, buffers and children."""
        attributes = module.__dict__
        self.given(type, module, type(module))
        self.length(attributes)
        for name in ("_parameters", "_buffers", "_modules"):
            self._views.append(attributes[name].values())

    def tensor(self, value: Any) -> None:
        """Note what a tensor or an array holds."""
        self._tensors.append(value)

    def computed(self, get: Callable[[], Any], value: Any) -> None:
        """Note what a function returns, which may be another object each time."""
        self._computed.append((get, value))

    def length(self, value: Any) -> None:
        """Note the number of entries of a list or a dict, and not what they are."""
        self._sized.append(value)

    def seal(self) -> None:
        """Read the places noted so far: later checks compare with now."""
        ways, columns = list(self._columns), self._columns.values()
        holders, values = [x for x, _ in columns], [x for _, x in columns]
        were = list(chain.from_iterable(values))
        filled, empty = [x for x in self._views if len(x)], [x for x in self._views if not len(x)]
        held, sized = list(chain.from_iterable(filled)), [*filled, *self._sized]
        lengths, contents, num_hooks = list(map(len, sized)), Contents(self._tensors), RemovableHandle.next_id

        def hold() -> bool:
            return (
                RemovableHandle.next_id == num_hooks
                and not any(empty)
                and list(map(len, sized)) == lengths
                and all(map(is_, chain.from_iterable(filled), held))
                and all(map(is_, chain.from_iterable(map(map, ways, holders)), were))
                and not any(map(contains, *self._absent))
                and all((x := get()) is was or plain(x) == plain(was) is not None for get, was in self._computed)
                and contents.hold()
            )

        self._hold = hold

    def hold(self) -> bool:
        """Whether every place holds the object that it held."""
        try:
            return self._hold()
        except (AttributeError, KeyError, RuntimeError, ValueError):  # a place is gone
            return False
