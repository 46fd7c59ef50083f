"""Mappings as nodes of trees: their entries as they are kept, and how one is made of entries again."""

from __future__ import annotations

import dataclasses
import sys
from collections import OrderedDict, UserDict
from collections.abc import Callable, Iterable
from typing import Any

import torch

from .classes import made_by


@dataclasses.dataclass(frozen=True)
class Keys:
    """The keys of a mapping, of which those of equal ones may be `given` in another order, as with dicts."""

    sorted: tuple[Any, ...]
    given: tuple[Any, ...] = dataclasses.field(compare=False)

    def in_order(self, children: Iterable[Any]) -> dict[Any, Any]:
        """The mapping's entries as they were given."""
        items = dict(zip(self.sorted, children, strict=True))
        return {k: items[k] for k in self.given}


Ways = tuple[Callable[[Any], tuple[list[Any], Keys, tuple[Any, ...]]], Callable[[Keys, list[Any]], Any]]


def base_of(cls: Any) -> Any:
    """Return the class whose methods tell what a dict holds, whatever its own say; None for anything but a dict."""
    return OrderedDict if issubclass(cls, OrderedDict) else dict if issubclass(cls, dict) else None


def ways_of(cls: Any) -> Ways | None:
    """Return (a function that gives the entries of a mapping, its keys as they are remembered, and their names; a
    function that makes one of keys and entries). None for an object whose class is written in Python: it may keep its
    entries anywhere.

    A dict, or what wraps one, has its entries as they are kept and not as its methods show them; none of its class's
    code runs. A mapping written in C has those that it shows.
    """
    base, wrapped = base_of(cls), issubclass(cls, UserDict)
    if base is None and not wrapped and made_by(cls) is object.__new__:
        return None

    def entries_of(x: Any) -> tuple[list[Any], Keys, tuple[Any, ...]]:
        items = x.data if wrapped else x
        kind = base or type(items)
        given = tuple(kind.keys(items))
        keys = tuple(sorted(given, key=lambda k: (type(k).__name__, k)))
        return [kind.__getitem__(items, k) for k in keys], Keys(keys, given), keys

    def make(keys: Keys, children: list[Any]) -> Any:
        items = keys.in_order(children)
        if base is None and not wrapped:
            return cls(items)
        x = made_by(cls)(cls)
        if wrapped:
            x.data = items
        for key in items if base is not None else ():
            base.__setitem__(x, key, items[key])
        return x

    return entries_of, make


def is_tensordict(cls: type) -> bool:
    """Return whether a class is TensorDict's, without importing tensordict."""
    base = getattr(sys.modules.get("tensordict"), "TensorDictBase", None)  # None while it is being imported
    return base is not None and issubclass(cls, base)


def tensordict_parts(x: Any) -> tuple[list[Any], Any, tuple[str, ...]]:
    """Return a TensorDict's entries, what is remembered of it, and the entries' names."""
    keys = Keys(tuple(sorted(x.keys())), tuple(x.keys()))
    return [x.get(k) for k in keys.sorted], (keys, tuple(x.batch_size)), keys.sorted


def tensordict_of(aux: tuple[Keys, tuple[int, ...]], children: Iterable[Any]) -> Any:
    """Rebuild a TensorDict, or a plain dict if a child is neither tensor nor TensorDict (such as a `Sharded`).

    Leaves may have been cut or stacked: the batch size becomes their common leading shape.
    """
    keys, batch_size = aux
    items = keys.in_order(children)
    if not all(isinstance(v, torch.Tensor) or is_tensordict(type(v)) for v in items.values()):
        return items
    shapes = [tuple(v.shape) for v in items.values()]
    dims = len(batch_size)
    while dims and len({s[:dims] if len(s) >= dims else None for s in shapes}) != 1:
        dims -= 1
    return sys.modules["tensordict"].TensorDict(items, batch_size=shapes[0][:dims] if shapes else batch_size)
