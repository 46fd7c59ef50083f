"""Numbers that a captured method takes from tensors: known later, in place of an error or of a trace's symbol."""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode

from .deferred_values import Done, Later, Traced, combined, has_later, is_traced, number_of, refuse
from .recording_containers import is_recorder


class Asks(TorchFunctionMode):
    """Inside, a number that is taken from a tensor is known later."""

    def __init__(self) -> None:
        super().__init__()
        self.taken: list[tuple[weakref.ref[Later], str]] = []  # numbers, and the lines at which they were
        self._asking = False

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _ASKS and is_traced(args[0]) and not self._asking:
            return self._asked(func, *args, **kwargs)
        if func is Tensor.data_ptr and is_traced(args[0]):
            refuse(
                "the step asks for the address of a tensor, which has no address while the step is captured. To find "
                "tied parameters, compare id(p), or list named_parameters(), which lists each of them once. To call a "
                "kernel that takes addresses, wrap it in torch.library.custom_op."
            )
        for x in args:
            if is_recorder(x):
                iter(x)  # torch reads it without a word
        if has_later([*args, *kwargs.values()]):
            return combined(func, args, kwargs)
        return func(*args, **kwargs)

    def _asked(self, func: Any, x: Tensor, *args: Any, **kwargs: Any) -> Later:
        kept = x.detach().clone()  # the step may write to it

        @functools.cache
        def now() -> Any:
            before, self._asking = self._asking, True
            try:
                return func(kept, *args, **kwargs)
            finally:
                self._asking = before

        found = Later(Done(_ASKS[func], (Traced(kept), *args), kwargs), now)
        self.taken.append((weakref.ref(found), _line()))
        return found


def _line() -> str:
    """Return the line that takes a number, outside of this library and torch."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in ("zerofn", "torch"):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def _listed(x: Any) -> Any:
    return x.tolist() if isinstance(x, Tensor) else x


_ASKS: dict[Any, Callable[..., Any]] = {
    Tensor.item: number_of,
    Tensor.tolist: _listed,
    Tensor.numpy: lambda x, *args, **kwargs: x.cpu().numpy(),
}
