"""The places that facts were read from, and a fast check that they hold the same objects as then.

A model of a thousand modules has some ten thousand places, which are looked at before every step. So all places that
are read in one way make one column, and Python's C code reads and compares all columns in one go.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from operator import attrgetter, contains, is_, itemgetter
from types import CellType, FunctionType
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

from .contents import Contents
from .facts import plain
from .user_code import of_user


class Places:
    """Places with the objects that they held when they were noted. `hold` says whether they still do."""

    def __init__(self) -> None:
        self._columns: dict[tuple[Any, str], tuple[Callable[[Any], Any], list[Any], list[Any]]] = {}
        self._absent: tuple[list[Any], list[str]] = ([], [])  # dicts, and the key that each lacks
        self._classes: set[type] = set()
        self._views: list[Any] = []
        self._sized: list[Any] = []
        self._tensors: list[Any] = []
        self._computed: list[tuple[Callable[[], Any], Any]] = []
        self._hold: Callable[[], bool] = lambda: False

    def item(self, holder: Any, key: str, value: Any) -> None:
        """Note `holder[key]`."""
        self._note(itemgetter, holder, key, value)

    def attribute(self, holder: Any, name: str, value: Any) -> None:
        """Note `holder.name`."""
        self._note(attrgetter, holder, name, value)

    def kind(self, value: Any) -> None:
        """Note a value's class."""
        self._note(type, value, "", type(value))

    def _note(self, way: Callable[[Any], Any], holder: Any, key: str, value: Any) -> None:
        column = self._columns.get((way, key))
        if column is None:
            column = self._columns[way, key] = (way(key) if way is not type else type, [], [])
        column[1].append(holder)
        column[2].append(value)

    def absent(self, holder: Any, key: str) -> None:
        """Note that a dict lacks a key."""
        self._absent[0].append(holder)
        self._absent[1].append(key)

    def classes(self, kind: type) -> None:
        """Note a class's bases, and how much those of the user's hold: what is new there may come before what is found
        now.
        """
        self.attribute(kind, "__mro__", kind.__mro__)
        for x in kind.__mro__:
            if of_user(x) and x not in self._classes:
                self._classes.add(x)
                self.length(x.__dict__)

    def contents(self, view: Any) -> None:
        """Note the entries of a list, or of the live view of a dict."""
        self._views.append(view)

    def cell(self, cell: CellType, value: Any) -> None:
        """Note what a closure cell holds."""
        self.attribute(cell, "cell_contents", value)

    def function(self, function: FunctionType) -> None:
        """Note a function's code and defaults."""
        for name in ("__code__", "__defaults__", "__kwdefaults__"):
            self.attribute(function, name, getattr(function, name))

    def module(self, module: nn.Module) -> None:
        """Note a module's class, the number of its attributes, its parameters, buffers and children."""
        attributes = module.__dict__
        self.kind(module)
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
        ways, holders, values = zip(*self._columns.values(), strict=True) if self._columns else ((), (), ())
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
