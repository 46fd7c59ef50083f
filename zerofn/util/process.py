"""What a process has once: the transfers under way, the thread that updates state on the host, the arenas.

Each is an object of a class of its own, and `the` is the only way to it, so that whoever wants to know what outlives a
step finds it here: `grep -rn "the(" zerofn`. Tests put another object in its place with `instead`. Caches of facts that
do not change (a kernel library, a rate that was measured) are `functools.cache`s where they are used.
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
    """The process's object of a class, made without arguments when it is first asked for."""
    found = _objects.get(kind)
    if found is None:
        with _lock:
            found = _objects.get(kind)
            if found is None:
                found = _objects[kind] = kind()
    return found


@contextlib.contextmanager
def instead(thing: T) -> Iterator[T]:
    """Inside, `the` gives this object of its class."""
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
    """A forked process has neither the threads nor the transfers of the one that it comes from."""
    global _lock
    _lock = threading.RLock()
    for thing in list(_objects.values()):
        if hasattr(thing, "forked"):
            thing.forked()


os.register_at_fork(after_in_child=_forked)
