"""State of the process: the transfers under way, the thread that updates state on the host, the arenas.

Each is an object of its own class, and `the` is the only way to it: `grep -rn "the(" zerofn` lists what outlives a
step. Tests replace one with `instead`. Caches of facts that do not change (a kernel library, a measured rate) are
`functools.cache`s where they are used; `tests/test_house.py` lists the rest.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from typing import Any, TypeVar

T = TypeVar("T")

_objects: dict[type, Any] = {}
_lock = threading.RLock()


def the(kind: type[T]) -> T:
    """Return the process's object of a class, made without arguments at the first call."""
    found = _objects.get(kind)
    if found is None:
        with _lock:
            found = _objects.get(kind)
            if found is None:
                found = _objects[kind] = kind()
    return found


@contextlib.contextmanager
def instead(thing: T) -> Iterator[T]:
    """Inside, `the` returns this object for its class."""
    before = _objects.get(type(thing))
    _objects[type(thing)] = thing
    try:
        yield thing
    finally:
        if before is None:
            _objects.pop(type(thing), None)
        else:
            _objects[type(thing)] = before


def _forked() -> None:
    """Tell the objects in a forked process: it has none of its parent's threads and transfers."""
    global _lock
    _lock = threading.RLock()
    for thing in list(_objects.values()):
        if hasattr(thing, "forked"):
            thing.forked()


os.register_at_fork(after_in_child=_forked)
