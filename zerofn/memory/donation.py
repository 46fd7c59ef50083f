"""Tensors whose memory belongs to somebody else now: known by identity, held weakly."""

from __future__ import annotations

import weakref
from collections.abc import Iterable

from torch import Tensor

from ..util.process import the


class Given(dict[int, tuple[weakref.ref[Tensor], str]]):
    """The tensors that were given away and still exist, by id, and why."""


def give(x: Tensor, why: str) -> None:
    """From here on `check` raises `why` for this very tensor."""
    key, given = id(x), the(Given)
    given[key] = weakref.ref(x, lambda _: given.pop(key, None)), why


def reason(tensors: Iterable[Tensor]) -> str | None:
    """Why one of them, which was given away, can no longer be used; None where all can."""
    given = the(Given)
    if not given:  # nearly always: who gives a state away drops it
        return None
    for x in tensors:
        ref, why = given.get(id(x), (None, None))
        if ref is not None and ref() is x:
            return why
    return None


def check(tensors: Iterable[Tensor]) -> None:
    """Raise `RuntimeError` for a tensor that was given away."""
    why = reason(tensors)
    if why is not None:
        raise RuntimeError(why)
