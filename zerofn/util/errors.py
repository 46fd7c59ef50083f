"""Errors are for people: what is added to one that comes from elsewhere."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Collection, Iterable, Iterator
from types import CellType
from typing import Any

_EMPTY = CellType()  # compares without a look at what a full one holds


def note(error: BaseException, text: str) -> None:
    """Add a line to what an error says, keeping its type; before Python 3.11 it goes into the message."""
    if not text or text in said(error):
        return
    if hasattr(error, "add_note"):
        error.add_note(text)
    elif error.args and isinstance(error.args[0], str):
        error.args = (f"{error.args[0]}\n{text}", *error.args[1:])


def said(error: BaseException) -> str:
    """An error in words, with its notes.

    >>> said(KeyError("w"))
    "KeyError: 'w'"
    """
    return "\n".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", ())])


def nearest(word: object, known: Iterable[object], most: int = 2, cutoff: float = 0.7) -> list[str]:
    """What may have been meant by `word`, the likeliest first; `likeness` from 0 (anything) to 1 (the same).

    >>> nearest("a.wieght", ["a.weight", "b.weight", "step"])
    ['a.weight', 'b.weight']
    """
    return difflib.get_close_matches(str(word), list(map(str, known)), most, cutoff)


def some(names: Collection[str], most: int = 4) -> str:
    """A few of many names.

    >>> some(["a", "b", "c"], 2)
    "'a', 'b', ... (3 in all)"
    """
    shown = ", ".join(repr(name) for name, _ in zip(names, range(most), strict=False))
    return shown if len(names) <= most else f"{shown}, ... ({len(names)} in all)"


def words_of(function: Callable[..., Any]) -> Iterator[str]:
    """The strings that a function is written with, its own and those it closes over."""
    if not inspect.isfunction(function):
        return
    closed = [cell.cell_contents for cell in function.__closure__ or () if cell != _EMPTY]
    for value in (*function.__code__.co_consts[1 if function.__doc__ else 0 :], *closed):
        for word in value if isinstance(value, tuple | list | frozenset | set) else [value]:
            if isinstance(word, str) and word:
                yield word


class DiskError(OSError):
    """A drive, or a folder on one, that cannot do what it is asked."""

    def __init__(self, message: str, number: int | None = None) -> None:
        super().__init__(message)
        self.errno = number


class CheckpointError(RuntimeError):
    """What lies on the disk cannot be used, or could not be written."""
