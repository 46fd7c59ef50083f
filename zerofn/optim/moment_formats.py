"""In which formats an optimizer keeps its moments.

`None` is the parameters' dtype. "bf16" and "8bit" (blocks of 256 with one scale, see `ops/csrc/formats.h`) are rounded
stochastically after every update: to nearest, a second moment that decays by a thousandth a step would never fall. The
type of a state says how `shard` keeps its fields; the random bits are a function of the count of applied updates and
the element's place, so every stage, number of ranks and tier gives the same.
"""

from __future__ import annotations

from typing import Any

import torch

from .. import tree

FORMATS = (None, "bf16", "8bit")


def check(where: str, moments: str | None) -> None:
    """Raise `ValueError` for a format that there is none of."""
    if moments not in FORMATS:
        raise ValueError(
            f"{where}: moments={moments!r} is not known; there are None (the parameters' dtype), 'bf16' and '8bit'."
        )


def initial(params: Any, moments: str | None, value: float = 0.0) -> Any:
    """Moments of `value` for a tree of parameters."""
    dtype = torch.bfloat16 if moments == "bf16" else None
    return tree.tree_map(lambda p: torch.full_like(p, value, dtype=dtype), params)
