"""Values that several sliced layers of one module share: inputs and random draws.

If several sliced layers read one input (q, k and v), we apply `vary` to that input once. Its gradient is then
all-reduced once instead of three times. Random draws between sliced layers differ between ranks.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .._torch_compat import current_trace, functorch_level
from ..collectives.expected import BETWEEN_SLICES, OWN_OF
from ..collectives.maps import Linear, Vary, ops
from ..comm.mesh import Axis
from ..random.mode import places_kept


@dataclass(frozen=True)
class Own:
    """The identity. It marks a value of which ranks must have different ones; a captured step checks this. `of`: who
    gets it.
    """

    axis: Axis
    of: str
    checked: bool = True

    @property
    def transpose(self) -> Own:
        """The value itself."""
        return Own(self.axis, self.of, False)

    def __call__(self, x: Tensor) -> tuple[Tensor]:
        """The value itself."""
        return (ops.expect(x, self.axis.name, OWN_OF + self.of) if self.checked else x.view_as(x),)


class Varied:
    """`vary` for the layers of one module: while its forward runs, the same tensor gives the same result again.

    Random draws after a layer with a sliced output differ between ranks, up to a layer with a sliced input, or up to
    the end of the forward.
    """

    def __init__(self, axis: Axis) -> None:
        self._axis = axis
        self._known: list[tuple[Tensor, tuple[Any, ...], Tensor]] | None = None

    def __call__(self, x: Tensor) -> Tensor:
        """`vary` of x over the axis."""
        # A result belongs to the transform and to the mode of autograd in which it was made, and to x as it was then.
        when = functorch_level(), torch.is_grad_enabled(), x._version
        for known, then, out in self._known or ():
            if known is x and then == when:
                return out
        (out,) = Linear.apply(Vary(self._axis), x)
        if self._known is not None:
            self._known.append((x, when, out))
        return out

    def inside(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """Return the module's forward, at whose end all is forgotten."""

        @functools.wraps(forward)
        def run(*args: Any, **kwargs: Any) -> Any:
            before, self._known = self._known, []
            try:
                with places_kept():
                    return forward(*args, **kwargs)
            finally:
                self._known = before

        return run


def with_varied_parameters(
    part: nn.Module, forward: Callable[..., Any], axis: Axis, name: str = ""
) -> Callable[..., Any]:
    """Return the forward of a module with whole parameters that each rank uses differently. `name`: of the module, for
    errors.
    """

    def run(*args: Any, **kwargs: Any) -> Any:
        own = dict(part._parameters)
        if name and len(args) == 1 and not kwargs and isinstance(args[0], Tensor) and current_trace() is not None:
            args = Linear.apply(Own(axis, name + BETWEEN_SLICES), args[0])
        try:
            for last, x in own.items():
                if x is not None:
                    (part._parameters[last],) = Linear.apply(Vary(axis, of=name and name + BETWEEN_SLICES), x)
            return forward(*args, **kwargs)
        finally:
            part._parameters.update(own)

    return run
