"""Functions of other libraries, replaced while somebody is inside; Python's garbage collector, which may rest."""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

Replacement = tuple[Any, str, Callable[[Any], Any]]  # owner, name, what is there -> what takes its place


class Patches:
    """A context manager that may be entered again inside itself and from several threads: the first to enter replaces,
    the last to leave puts back. `replacements` is asked each time the first one enters."""

    def __init__(self, replacements: Callable[[], Iterable[Replacement]]) -> None:
        self._replacements = replacements
        self._lock = threading.Lock()
        self._num_inside = 0
        self._originals: list[tuple[Any, str, Any]] = []

    def __enter__(self) -> None:
        with self._lock:
            self._num_inside += 1
            if self._num_inside > 1:
                return
            for owner, name, wrap in self._replacements():
                original = getattr(owner, name)
                self._originals.append((owner, name, original))
                setattr(owner, name, wrap(original))

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._num_inside -= 1
            if self._num_inside == 0:
                while self._originals:
                    setattr(*self._originals.pop())


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """Inside, the collector rests: what a trace and passes make stays, and it would walk all of it again and again."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
