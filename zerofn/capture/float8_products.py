"""Which weights a captured step multiplies by in float8, and why it does not multiply by the others so."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from contextvars import ContextVar

_seen: ContextVar[list[Mapping[str, str]] | None] = ContextVar("products", default=None)


@contextlib.contextmanager
def noted_products() -> Iterator[list[Mapping[str, str]]]:
    """Inside, `note_products` adds to the list."""
    found: list[Mapping[str, str]] = []
    before = _seen.set(found)
    try:
        yield found
    finally:
        _seen.reset(before)


def note_products(found: Mapping[str, str]) -> None:
    """Note, during a capture, what becomes of each weight of one loss: name -> "" for float8, or why not."""
    seen = _seen.get()
    if seen is not None:
        seen.append(found)


def float8_of(noted: Sequence[Mapping[str, str]]) -> dict[str, str] | None:
    """Return what becomes of each weight, which is float8 if it is so in one loss; None if no loss has such products.

    >>> float8_of([{"a": "", "b": "odd"}, {"a": "unused", "b": "odd"}])
    {'a': '', 'b': 'odd'}
    """
    found: dict[str, str] = {}
    for each in noted:
        found |= {name: why and found.get(name, why) for name, why in each.items()}
    return found if noted else None
