"""Notes on an error that a captured step raises while it runs: the operation and the user's line."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .._torch_compat import OpOverload
from ..capture.advice import note_dtypes
from ..capture.capture import capture
from ..graph.program import Program
from ..graph.source_lines import place_of
from ..util.errors import note
from .executor import failed_node


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
