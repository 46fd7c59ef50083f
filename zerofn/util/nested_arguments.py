"""Find tensors among an operation's arguments, which contain lists, tuples and dictionaries only.

`torch.utils._pytree` looks every container up in a registry; a capture asks this a hundred thousand times.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor


def tensors_in(x: Any) -> Iterator[Tensor]:
    """All tensors of `x`, in order."""
    if isinstance(x, Tensor):
        yield x
    elif isinstance(x, list | tuple):
        for each in x:
            yield from tensors_in(each)
    elif isinstance(x, dict):
        for each in x.values():
            yield from tensors_in(each)


def with_tensors(x: Any, change: Callable[[Tensor], Any]) -> Any:
    """Return `x` with each tensor replaced by what `change` makes of it."""
    if isinstance(x, Tensor):
        return change(x)
    if isinstance(x, list):
        return [with_tensors(each, change) for each in x]
    if isinstance(x, tuple):
        return tuple([with_tensors(each, change) for each in x])
    if isinstance(x, dict):
        return {key: with_tensors(each, change) for key, each in x.items()}
    return x
