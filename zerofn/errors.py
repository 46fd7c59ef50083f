"""Errors are for people: what is added to one that comes from elsewhere."""

from __future__ import annotations


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
