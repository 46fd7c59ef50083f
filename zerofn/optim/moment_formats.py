"""The formats in which an optimizer stores its moments: those of `ops.codecs.MOMENTS`.

`None` is the parameters' dtype. "bf16", "8bit" (blocks of 256 with one scale, see `ops/csrc/formats.h`) and "fp8" (the
same with float8, see [Note: float8 moments] in `ops/fp8.py`) are rounded stochastically after every update: rounded to
nearest, a second moment that decays by a thousandth a step would never fall. The type of a state declares how `shard`
stores its fields. The random bits depend on the count of applied updates and the element's position, so every stage,
number of ranks and tier gives the same.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from .. import tree
from ..ops.codecs import MOMENTS


def check(where: str, moments: str | None) -> None:
    """Raise `ValueError` for an unknown format."""
    if moments not in MOMENTS:
        *others, last = [repr(name) for name in MOMENTS if name is not None]
        raise ValueError(
            f"{where}: moments={moments!r} is not known; there are None (the parameters' dtype), "
            f"{', '.join(others)} and {last}."
        )


def initial(params: Any, moments: str | None, value: float = 0.0) -> Any:
    """Moments of `value` for a tree of parameters."""
    dtype = MOMENTS[moments].dtype
    return tree.tree_map(lambda p: torch.full_like(p, value, dtype=dtype), params)


@functools.cache
def state_type(base: Any, moments: str | None) -> Any:
    """Return the type of an optimizer's state with moments in a format: `base`, or a subclass whose attribute
    `moment_storage` says by which codec and in which dtype `shard` stores a field.

    `base`: a namedtuple type whose first field is the count of updates; the others are the moments, in the order in
    which the update rule takes them.
    """
    form = MOMENTS[moments]
    if not form.encoded and form.dtype is None:
        return base
    storage = {field: (codec, form.dtype) for field, codec in zip(base._fields[1:], form.codecs, strict=False)}

    def reduce(self: Any) -> tuple[Any, ...]:  # pickle cannot find the subclass by its name
        return _state, (base, moments, tuple(self))

    members = {"__slots__": (), "__module__": base.__module__, "__reduce__": reduce, "moment_storage": storage}
    return type(f"{base.__name__}[{moments}]", (base,), members)


def _state(base: Any, moments: str | None, fields: tuple[Any, ...]) -> Any:
    return state_type(base, moments)(*fields)
