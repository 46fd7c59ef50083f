"""Let recomputation in the backward pass see the parameters of the forward pass.

`torch.func.functional_call` lends parameters to a module for one call. `torch.utils.checkpoint` calls segments of that
module again in the backward pass, after `functional_call` has returned. By then the module has its own parameters back.
These have other values, or no data at all. So each segment remembers which parameters were lent when it first ran.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import Any

from .._torch_compat import CHECKPOINT_SEGMENT, LEND_PARAMETERS, list_parameters_again
from ..util.patches import Patches


class _Lent(threading.local):
    """The calls of `functional_call` in progress in this thread: (module, parameters, options)."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, dict[str, Any], dict[str, Any]]] = []


_lent = _Lent()


def same_parameters() -> Patches:
    """Return a context in which segments are recomputed with the parameters that they first ran with.

    Segments are those of `torch.utils.checkpoint`, parameters those that `functional_call` lent. Run both the
    forward and the backward pass inside.
    """
    return _patches


def _noted(lend: Callable[..., Any]) -> Callable[..., Any]:
    @contextmanager
    @wraps(lend)
    def noted(module: Any, parameters: dict[str, Any], **options: Any) -> Iterator[None]:
        with lend(module, parameters, **options):
            _lent.calls.append((module, parameters, options))
            try:
                yield
            finally:
                _lent.calls.pop()
        list_parameters_again(module)

    return noted


def _remembering(segment: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(segment)
    def remembering(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        calls = list(_lent.calls)

        @wraps(fn, updated=())
        def again(*inputs: Any, **named: Any) -> Any:
            lend = getattr(*LEND_PARAMETERS)
            with ExitStack() as stack:
                for module, parameters, options in calls:
                    stack.enter_context(lend(module, dict(parameters), **options))
                return fn(*inputs, **named)

        return segment(again, *args, **kwargs)

    return remembering


_patches = Patches(lambda: ((*LEND_PARAMETERS, _noted), (*CHECKPOINT_SEGMENT, _remembering)))
