"""Which weights a captured step multiplies by in float8, and why it does not multiply by the others so."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Mapping, Sequence
from contextvars import ContextVar

from ..util.context import inside

_SOME = "in some calls: "
_seen: ContextVar[list[Mapping[str, str]] | None] = ContextVar("products", default=None)


def noted_products() -> contextlib.AbstractContextManager[list[Mapping[str, str]]]:
    """Inside, `note_products` adds to the list."""
    return inside(_seen, [])


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
        found |= {name: min(found.get(name, why), why, key=_bfloat16) for name, why in each.items()}
    return found if noted else None


def of_calls(whys: Collection[str]) -> str:
    """Return what becomes of a weight, of its calls: "" if all are float8, or why they are not.

    >>> of_calls(["", "its input is empty"]), of_calls(["its input is empty"])
    ('in some calls: its input is empty', 'its input is empty')
    """
    float8, others = "" in whys, [why for why in whys if why]
    return (_SOME if float8 else "") + others[0] if others else ""


def none_is_float8(found: Mapping[str, str]) -> bool:
    """Return whether no product is float8."""
    return all(_bfloat16(why) == 2 for why in found.values())


def _bfloat16(why: str) -> int:
    """Return 0 if all products with a weight are float8, 1 if some are, and 2 if none is."""
    return (1 if why.startswith(_SOME) else 2) if why else 0
