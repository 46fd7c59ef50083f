"""Helpers for errors: notes, nearest names, short lists."""

from __future__ import annotations

import difflib
import inspect
import os
import traceback
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any, NoReturn

from .closures import closed_over
from .user_line import is_users, place


def note(error: BaseException, text: str) -> None:
    """Add a line to an error, and keep its type. Before Python 3.11 it goes into the message."""
    if not text or text in said(error):
        return
    if hasattr(error, "add_note"):
        error.add_note(text)
    elif error.args and isinstance(error.args[0], str):
        error.args = (f"{error.args[0]}\n{text}", *error.args[1:])


def said(error: BaseException) -> str:
    """Return an error as text, with its notes.

    >>> said(KeyError("w"))
    "KeyError: 'w'"
    """
    return "\n".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", ())])


def again(error: Exception) -> NoReturn:
    """Raise an error that was caught before."""
    raise error


def nearest(word: object, known: Iterable[object], most: int = 2, cutoff: float = 0.7) -> list[str]:
    """Return the known words that `word` may have meant, in any case, the likeliest first. `cutoff`: from 0 (anything)
    to 1 (equal).

    >>> nearest("a.wieght", ["a.weight", "b.weight", "step"])
    ['a.weight', 'b.weight']
    """
    by_lower = {str(x).lower(): str(x) for x in known}
    return [by_lower[x] for x in difflib.get_close_matches(str(word).lower(), by_lower, most, cutoff)]


def some(names: Collection[str], most: int = 4) -> str:
    """A few of many names.

    >>> some(["a", "b", "c"], 2)
    "'a', 'b', ... (3 in all)"
    """
    shown = ", ".join(repr(name) for name, _ in zip(names, range(most), strict=False))
    return shown if len(names) <= most else f"{shown}, ... ({len(names)} in all)"


def printable(text: str) -> str:
    """Return a text in which what would steer a terminal, or not be seen, is escaped, but for the ends of lines.

    >>> printable("a\\x1b[2J\\nb\\u202e")
    'a\\\\x1b[2J\\nb\\\\u202e'
    """
    if text.replace("\n", "").isprintable():
        return text
    return "".join(c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in text)


def words_of(function: Callable[..., Any]) -> Iterator[str]:
    """Return the strings in a function's code, and those it closes over."""
    if not inspect.isfunction(function):
        return
    for value in (*function.__code__.co_consts[1 if function.__doc__ else 0 :], *closed_over(function).values()):
        for word in value if isinstance(value, tuple | list | frozenset | set) else [value]:
            if isinstance(word, str) and word:
                yield word


class DiskError(OSError):
    """A drive, or a folder on one, failed or cannot be used."""

    def __init__(self, message: str, number: int | None = None) -> None:
        super().__init__(message)
        self.errno = number


class CaptureError(RuntimeError):
    """The step cannot be captured. The message says which line is the cause, why, and what to write instead.

    The traceback has the user's frames alone; with the environment variable `ZEROFN_TRACEBACK=full` it has all.

    >>> import torch, zerofn
    >>> def train_step(state, x):
    ...     return state, x if x.sum() > 0 else -x
    >>> try:
    ...     zerofn.compile(train_step)({}, torch.ones(2))
    ... except zerofn.CaptureError as error:
    ...     print(str(error).split(". ")[1])
    A captured step cannot branch on data
    """

    def _render_traceback_(self) -> list[str]:
        """In a notebook: the sentence first, then the user's frames."""
        rows = list(traceback.extract_tb(self.__traceback__))
        if os.environ.get("ZEROFN_TRACEBACK") != "full":
            rows = [x for x in rows if is_users(x.filename)]
        return [said(self), "", *(f"  {place(x.filename, x.lineno or 0)}, in {x.name}\n    {x.line}" for x in rows)]


class CheckpointError(RuntimeError):
    """A checkpoint cannot be used, or could not be written.

    >>> import zerofn
    >>> try:
    ...     zerofn.load("no-such-folder", like={})
    ... except zerofn.CheckpointError:
    ...     print("start anew")
    start anew
    """
