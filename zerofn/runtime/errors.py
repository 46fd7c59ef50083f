"""What a person sees of a step's error: the user's frames if it cannot be captured; notes on the operation and the
user's line if it fails while it runs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

from .._torch_compat import OpOverload
from ..capture.advice import note_dtypes
from ..capture.capture import capture
from ..graph.program import Program
from ..graph.source_lines import place_of, without_our_frames
from ..util.errors import note
from .executor import failed_node

F = TypeVar("F", bound=Callable[..., Any])


def users_frames(through: str) -> Callable[[F], F]:
    """Wrap a method, so that errors of the method `through`, which captures, come with the user's frames alone."""

    def wrap(method: F) -> F:
        @functools.wraps(method)
        def call(*args: Any, **kwargs: Any) -> Any:
            try:
                return method(*args, **kwargs)
            except Exception as error:
                row = error.__traceback__
                while row is not None and row.tb_frame.f_code.co_name != through:
                    row = row.tb_next
                if row is None:
                    raise
                __tracebackhide__ = True  # IPython leaves out a frame that has this name
                short = without_our_frames(error.__traceback__)
                raise error.with_traceback(short)  # noqa: B904 (its cause is its own)

        return call  # type: ignore[return-value]

    return wrap


def explain(
    error: Exception, step: Callable[[Any, Any], Any], name: str, program: Program, state: Any, batch: Any
) -> None:
    """Add notes to an error: which operation failed, on which line of the user's, and mismatched dtypes.

    ZeroFn's own operations raise errors that need no note.
    """
    node = failed_node(error)
    if node is not None:
        if isinstance(node.target, OpOverload) and node.target.namespace == "zerofn":
            return
        place = place_of(node, program, lambda: capture(step, state, batch, traces=True))
        note(error, f"in {name}: {place}")
    note_dtypes(error, state, batch)
