"""`x.data = y` and `x.set_(y)` while a step is captured. They give `x` other memory and write to none, so they are no
operations of a graph: the trace is told here by what it knows `x` from then on.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .._torch_compat import FakeTensor, bind_alike, lower_modes, storage_key
from ..tracing.shortcut import KNOWN
from ..util.patches import Patches


class OuterAssignment(RuntimeError):
    """The step assigns the memory of a tensor that is not its own."""


def _data(original: Any) -> property:
    """Return `Tensor.data` with a setter that lets the trace know a tensor by what it was assigned."""

    def assign(x: Tensor, y: Tensor) -> None:
        fake, trace, _ = lower_modes()
        if fake is None or _is_same(x, y):
            original.__set__(x, y)
            return
        if not isinstance(x, FakeTensor):
            raise OuterAssignment(
                f"the step assigns to .data of a tensor of shape {tuple(x.shape)} from outside the step, which a "
                "captured step would not repeat. Return the new value in the state, or assign to a clone."
            )
        y = y.detach()  # a constant comes into the trace
        original.__set__(x, y)
        vars(x).pop(KNOWN, None)
        if trace is not None:  # a loop's body runs without one first
            bind_alike(trace.tracer, x, y)

    return property(original.__get__, assign)


def _set(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return `Tensor.set_`, which of a tensor does what an assignment of `.data` does."""

    @functools.wraps(original)
    def set_(x: Tensor, *source: Any, **options: Any) -> Tensor:
        if lower_modes()[0] is None or len(source) != 1 or not isinstance(source[0], Tensor):
            return original(x, *source, **options)
        x.data = source[0]
        return x

    return set_


def _is_same(x: Tensor, y: Tensor) -> bool:
    """Return whether an assignment changes nothing, such as that of `module.float()`."""
    if isinstance(x, FakeTensor) or isinstance(y, FakeTensor):
        return False
    return storage_key(x) == storage_key(y) and (x.shape, x.stride(), x.dtype) == (y.shape, y.stride(), y.dtype)


assigned_data = Patches(lambda: [(torch.Tensor, "data", _data), (torch.Tensor, "set_", _set)])
