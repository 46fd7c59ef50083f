"""Donated tensors: their memory belongs to another tensor. Known by identity, held weakly."""

from __future__ import annotations

import weakref
from collections.abc import Iterable

from torch import Tensor

from ..util.process import the


class Donated(dict[int, tuple[weakref.ref[Tensor], str]]):
    """The donated tensors that still exist, by id, and why they cannot be used."""


def give(x: Tensor, why: str) -> None:
    """From now on `check` raises `why` for this very tensor."""
    key, given = id(x), the(Donated)
    given[key] = weakref.ref(x, lambda _: given.pop(key, None)), why


def reason(tensors: Iterable[Tensor]) -> str | None:
    """Return why one of these tensors can no longer be used; None if all can."""
    given = the(Donated)
    if not given:  # nearly always: callers drop a donated state
        return None
    for x in tensors:
        ref, why = given.get(id(x), (None, None))
        if ref is not None and ref() is x:
            return why
    return None


def check(tensors: Iterable[Tensor]) -> None:
    """Raise `RuntimeError` for a donated tensor."""
    why = reason(tensors)
    if why is not None:
        raise RuntimeError(why)
