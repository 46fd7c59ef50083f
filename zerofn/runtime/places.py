"""The places that facts were read from, and a fast check that they hold the same objects as then.

A model of a thousand modules has some ten thousand places, which are looked at before every step. So all places that
are read in one way make one column, and Python's C code reads and compares all columns in one go.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import chain
from operator import attrgetter, contains, is_, itemgetter
from types import CellType, FunctionType
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

from .contents import Contents


class Places:
    """Places with the objects that they held when they were noted. `hold` says whether they still do."""

    def __init__(self) -> None:
        self._columns: dict[tuple[bool, str], tuple[Callable[[Any], Any], list[Any], list[Any]]] = {}
        self._ways: list[Callable[[Any], Any]] = []  # a way to read, for each column
        self._holders: list[list[Any]] = []  # what it reads from
        self._values: list[Any] = []  # what was there, of all columns in turn
        self._absent: tuple[list[Any], list[str]] = ([], [])  # dicts, and the key that each lacks
        self._views: list[Any] = []
        self._dicts: list[dict[str, Any]] = []
        self._modules: list[nn.Module] = []
        self._tensors: list[Any] = []
        self._mappings: list[tuple[Mapping[Any, Any], list[Any]]] = []
        self._long: list[Any] = []
        self._types: list[type] = []
        self._sized: list[Any] = []
        self._lengths: list[int] = []
        self._filled: list[Any] = []
        self._empty: list[Any] = []
        self._held: list[Any] = []
        self._contents = Contents([])
        self._num_hooks = RemovableHandle.next_id

    def item(self, holder: Any, key: str, value: Any) -> None:
        """Note `holder[key]`."""
        self._note(False, holder, key, value)

    def attribute(self, holder: Any, name: str, value: Any) -> None:
        """Note `holder.name`."""
        self._note(True, holder, name, value)

    def _note(self, is_attribute: bool, holder: Any, key: str, value: Any) -> None:
        column = self._columns.get((is_attribute, key))
        if column is None:
            get = attrgetter(key) if is_attribute else itemgetter(key)
            column = self._columns[is_attribute, key] = (get, [], [])
        column[1].append(holder)
        column[2].append(value)

    def absent(self, holder: Any, key: str) -> None:
        """Note that a dict lacks a key."""
        self._absent[0].append(holder)
        self._absent[1].append(key)

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
        self._modules.append(module)
        self._dicts.append(attributes)
        for name in ("_parameters", "_buffers", "_modules"):
            self._views.append(attributes[name].values())

    def tensor(self, value: Any) -> None:
        """Note what a tensor or an array holds."""
        self._tensors.append(value)

    def mapping(self, mapping: Mapping[Any, Any]) -> None:
        """Note the entries of a mapping that is no dict."""
        self._mappings.append((mapping, [*mapping.keys(), *mapping.values()]))

    def length(self, value: Any) -> None:
        """Note the number of entries of a list or a dict, and not what they are."""
        self._long.append(value)

    def seal(self) -> None:
        """Read the places noted so far: later checks compare with now."""
        self._ways = [get for get, _, _ in self._columns.values()]
        self._holders = [holders for _, holders, _ in self._columns.values()]
        self._values = [x for _, _, values in self._columns.values() for x in values]
        self._types = list(map(type, self._modules))
        self._filled = [x for x in self._views if len(x)]
        self._empty = [x for x in self._views if not len(x)]
        self._sized = [*self._dicts, *self._filled, *self._long]
        self._lengths = list(map(len, self._sized))
        self._held = list(chain.from_iterable(self._filled))
        self._contents = Contents(self._tensors)
        self._num_hooks = RemovableHandle.next_id

    def hold(self) -> bool:
        """Whether every place holds the object that it held."""
        try:
            return (
                RemovableHandle.next_id == self._num_hooks
                and list(map(type, self._modules)) == self._types
                and not any(self._empty)
                and list(map(len, self._sized)) == self._lengths
                and all(map(is_, chain.from_iterable(self._filled), self._held))
                and all(map(is_, chain.from_iterable(map(map, self._ways, self._holders)), self._values))
                and not any(map(contains, *self._absent))
                and all([*x.keys(), *x.values()] == was for x, was in self._mappings)
                and self._contents.hold()
            )
        except (AttributeError, KeyError, RuntimeError, ValueError):  # a place is gone
            return False
