"""The formats in which an optimizer stores its moments, declared in `ops.codecs.MOMENTS`.

None is the parameters' dtype. "bf16" is bfloat16. "8bit" has blocks of 256 elements with one scale (see
`ops/csrc/formats.h`), "fp8" the same with float8 elements (see [Note: float8 moments] in `ops/fp8.py`). The type of a
state declares how `shard` stores its fields.

Fused updates round all formats but None stochastically. Rounded to nearest, a second moment that decays by a thousandth
a step would never fall. The random bits depend on the count of applied updates and on the element's position in its
unit, so all stages, numbers of ranks and tiers give the same bits. `update` alone, which no `TrainState` calls, rounds
to nearest.
"""

from __future__ import annotations

import functools
from typing import Any, Literal

import torch

from .. import tree
from ..ops.codecs import MOMENTS

MomentWord = Literal["bf16", "8bit", "fp8"]  # of those in `MOMENTS`


def check(where: str, moments: str | None) -> None:
    """Raise `ValueError` for an unknown format."""
    if not isinstance(moments, str | None) or moments not in MOMENTS:
        *others, last = [repr(name) for name in MOMENTS if name is not None]
        raise ValueError(
            f"{where}: moments={moments!r} is not known; expected None (the parameters' dtype), {', '.join(others)} or "
            f"{last}."
        )


def in_format(tx: Any) -> bool:
    """Return whether a transformation, or one inside it, stores moments in a format other than None."""
    todo = [tx.init({})]
    while todo:
        x = todo.pop()
        if hasattr(x, "moment_storage"):
            return True
        todo += x if isinstance(x, tuple | list) else x.values() if isinstance(x, dict) else []
    return False


def initial(params: Any, moments: str | None, value: float = 0.0) -> Any:
    """Return moments of `value` for a tree of parameters."""
    dtype = MOMENTS[moments].dtype
    return tree.tree_map(lambda p: torch.full_like(p, value, dtype=dtype), params)


@functools.cache
def state_type(base: Any, moments: str | None) -> Any:
    """Return the type of an optimizer's state whose moments are in a format: `base`, or a subclass of it.

    `base`: a namedtuple type. Its first field is the count of updates. The others are the moments, in the order in
    which the update rule takes them. The attribute `moment_storage` of a subclass maps a field to the codec and
    dtype by which `shard` stores it.
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
