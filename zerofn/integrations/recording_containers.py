"""Containers that stand for a host's while its step is captured: they note what is done to them, and have it done to
a copy.
"""

from __future__ import annotations

import functools
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

Path = tuple[tuple[bool, Any], ...]
ALL = object()  # all entries of a container, and how many they are

_WRITES: dict[Any, str] = {
    list: "append extend insert remove pop clear sort reverse __setitem__ __delitem__ __iadd__ __imul__",
    deque: "append appendleft extend extendleft insert remove pop popleft clear rotate reverse __setitem__ __delitem__ "
    "__iadd__ __imul__",
    set: "add discard remove pop clear update difference_update intersection_update symmetric_difference_update "
    "__ior__ __iand__ __isub__ __ixor__",
    dict: "__setitem__ __delitem__ pop popitem clear update setdefault __ior__",
    Counter: "__setitem__ __delitem__ pop popitem clear update setdefault subtract __ior__ __iadd__ __isub__",
    OrderedDict: "__setitem__ __delitem__ pop popitem clear update setdefault move_to_end __ior__",
}
CHANGES = frozenset(" ".join(_WRITES.values()).split())  # methods that change a container
_READS = {
    "__len__", "__iter__", "__contains__", "__eq__", "__ne__", "__add__", "__reversed__", "index", "count", "copy",
    "keys", "values", "items", "most_common", "total", "elements", "__or__", "__and__", "__sub__",
}  # fmt: skip
_OF_ONE = {"__setitem__", "__delitem__", "setdefault"}  # write one entry, that of their first argument


class Known(NamedTuple):
    """What a recorded container knows: the recording, and where the host has it."""

    recording: Any
    path: Path


def kind_of(x: Any) -> Any:
    """Return the kind of a container that can be recorded; None for anything else."""
    kind = type(x)
    if kind in _WRITES:
        return kind
    return dict if kind is defaultdict else None


def is_recorder(x: Any) -> bool:
    """Whether a value is a container of this file."""
    return hasattr(type(x), "_zerofn_base")


def known_of(x: Any) -> Known:
    """Return what a recorded container knows."""
    found: Known = x._zerofn
    return found


def recorder(real: Any, recording: Any, path: Path) -> Any:
    """Return a container with a real one's entries, which tells `recording` what is read and written, by path."""
    base: Any = type(real)
    kind = _class_for(base)
    if base is defaultdict:
        made = kind(real.default_factory, real)
    elif base is deque:
        made = kind(real, real.maxlen)
    else:
        made = kind(real)
    made._zerofn = Known(recording, path)
    return made


@functools.cache
def _class_for(base: Any) -> Any:
    names: dict[str, Any] = {"_zerofn": None, "_zerofn_base": base, "__hash__": None}
    kind = dict if base is defaultdict else base
    for name in _READS:
        if hasattr(base, name):
            names[name] = _reading(base, name)
    for name in _WRITES[kind].split():
        names[name] = _writing(base, name)
    if base is not set:
        names["__getitem__"] = _getitem(base)
    if issubclass(base, dict):
        names["get"] = _get(base)
    return type(base.__name__, (base,), names)


def _reading(base: Any, name: str) -> Callable[..., Any]:
    method = getattr(base, name)

    def reads(self: Any, *args: Any, **kwargs: Any) -> Any:
        if (known := self._zerofn) is not None:
            known.recording.read(known.path, ALL)
        return method(self, *args, **kwargs)

    return reads


def _writing(base: Any, name: str) -> Callable[..., Any]:
    method = getattr(base, name)

    def writes(self: Any, *args: Any, **kwargs: Any) -> Any:
        known, self._zerofn = self._zerofn, None  # what Python does inside is no access of the step's
        try:
            if known is not None:
                new = name not in _OF_ONE or (issubclass(base, dict) and not dict.__contains__(self, args[0]))
                known.recording.write(known.path, args[0] if name in _OF_ONE else ALL, new)
                known.recording.call(known.path, name, args, kwargs)
            found = method(self, *args, **kwargs)
        finally:
            self._zerofn = known
        if found is self:
            return self
        return self[args[0]] if known is not None and name == "setdefault" else found

    return writes


def _getitem(base: Any) -> Callable[..., Any]:
    method = base.__getitem__

    def item(self: Any, key: Any) -> Any:
        if (known := self._zerofn) is None:
            return method(self, key)
        if isinstance(key, slice):
            known.recording.read(known.path, ALL)
            return method(self, key)
        self._zerofn = None
        try:
            found = method(self, key)  # may make one, of a defaultdict
        finally:
            self._zerofn = known
        return known.recording.entry(known.path, key, found, lambda x: base.__setitem__(self, key, x))

    return item


def _get(base: Any) -> Callable[..., Any]:
    def get(self: Any, key: Any, default: Any = None) -> Any:
        known = self._zerofn
        if known is None or dict.__contains__(self, key) and not isinstance(dict.__getitem__(self, key), float | int):
            return self[key] if dict.__contains__(self, key) else default
        value = dict.__getitem__(self, key) if dict.__contains__(self, key) else default
        if isinstance(value, int | float | Tensor) and not isinstance(value, bool):
            return known.recording.got(known.path, key, default, value)
        known.recording.read(known.path, ALL)
        return value

    return get
