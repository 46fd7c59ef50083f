"""Tensors whose memory belongs to somebody else now: known by identity, held weakly."""

from __future__ import annotations

import weakref
from collections.abc import Iterable

from torch import Tensor

_given: dict[int, tuple[weakref.ref[Tensor], str]] = {}


def give(x: Tensor, why: str) -> None:
    """From here on `check` raises `why` for this very tensor."""
    key = id(x)
    _given[key] = weakref.ref(x, lambda _: _given.pop(key, None)), why


def check(tensors: Iterable[Tensor]) -> None:
    """Raise `RuntimeError` for a tensor that was given away."""
    if not _given:  # nearly always: who gives a state away drops it
        return
    for x in tensors:
        ref, why = _given.get(id(x), (None, ""))
        if ref is not None and ref() is x:
            raise RuntimeError(why)
