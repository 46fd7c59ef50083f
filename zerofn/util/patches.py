"""Contexts: replace functions of other libraries, pause Python's garbage collector, let autocast keep casts."""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

Replacement = tuple[Any, str, Callable[[Any], Any]]  # owner, name, the original -> its replacement
_INHERITED = object()  # stands for what an owner has of a class above it


class Patches:
    """A reentrant, thread-safe context manager: the first to enter replaces, the last to leave restores.

    `replacements` is called whenever the first one enters.
    """

    def __init__(self, replacements: Callable[[], Iterable[Replacement]]) -> None:
        self._replacements = replacements
        self._lock = threading.Lock()
        self._num_inside = 0
        self._num_lifted = 0
        self._originals: list[tuple[Any, str, Any]] = []

    def __enter__(self) -> None:
        with self._lock:
            self._num_inside += 1
            self._replace()

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._num_inside -= 1
            if self._num_inside == 0:
                self._restore()

    @contextlib.contextmanager
    def lifted(self) -> Iterator[None]:
        """Inside, the originals are in their places: for code that knows functions by their identity."""
        with self._lock:
            self._num_lifted += 1
            self._restore()
        try:
            yield
        finally:
            with self._lock:
                self._num_lifted -= 1
                self._replace()

    def _replace(self) -> None:
        if self._originals or self._num_lifted or not self._num_inside:
            return
        for owner, name, wrap in self._replacements():
            original = getattr(owner, name)
            self._originals.append((owner, name, vars(owner).get(name, _INHERITED)))
            setattr(owner, name, wrap(original))

    def _restore(self) -> None:
        while self._originals:
            owner, name, original = self._originals.pop()
            if original is _INHERITED:
                delattr(owner, name)
            else:
                setattr(owner, name, original)


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """Inside, the garbage collector pauses. Traces and passes make objects that stay, and it would walk all of them
    repeatedly.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@contextlib.contextmanager
def autocast_cache(enabled: bool) -> Iterator[None]:
    """Inside, autocast keeps a weight's cast for further uses, or not; traces switch that off."""
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(enabled)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)
