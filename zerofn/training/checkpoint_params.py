"""Let recomputation in the backward pass see the parameters of the forward pass.

`torch.func.functional_call` lends parameters to a module for one call. `torch.utils.checkpoint` calls parts of that
module again when gradients are taken, after the call. By then the module has its own parameters back, which are others,
or have no data. Here each segment remembers the parameters that were lent when it first ran.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import Any

from .._torch_compat import CHECKPOINT_SEGMENT, LEND_PARAMETERS
from ..util.patches import Patches


class _Lent(threading.local):
    """The calls under way in this thread: (module, parameters, options)."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, dict[str, Any], dict[str, Any]]] = []


_lent = _Lent()


def same_parameters() -> Patches:
    """Inside, segments under `torch.utils.checkpoint` are recomputed with the parameters that `functional_call` gave
    them.

    Take gradients inside as well.
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
