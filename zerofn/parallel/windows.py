"""The attention windows of transformers' models, as patterns."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from ..sparse.patterns import Band, Both, Causal, Everything, Pattern

_FAR = 1 << 40  # tokens: more than a row has


def window_of(mask_function: Callable[..., Any]) -> Pattern | None:
    """Return the pattern of a mask function if its code shows that it is a window, a causal mask, or both.

    Return None for other functions, whose results may depend on a batch.
    """
    from transformers import masking_utils as known

    if not inspect.isfunction(mask_function):
        return None

    def is_like(name: str, *arguments: Any) -> bool:
        make = getattr(known, name, None)  # not there in all versions
        return make is not None and mask_function.__code__ is make(*arguments).__code__

    if mask_function is known.causal_mask_function:
        return Causal()
    if mask_function is getattr(known, "bidirectional_mask_function", None):
        return Everything()
    held = inspect.getclosurevars(mask_function).nonlocals
    if is_like("and_masks", known.causal_mask_function):
        parts = [window_of(function) for function in held["mask_functions"]]
        found = [part for part in parts if part is not None]
        return functools.reduce(Both, found) if len(found) == len(parts) else None
    if is_like("sliding_window_overlay", 1):
        return Band(1 - held["sliding_window"], _FAR)
    if is_like("sliding_window_bidirectional_overlay", 1):
        return Band(-held["sliding_window"], held["sliding_window"])
    return None
