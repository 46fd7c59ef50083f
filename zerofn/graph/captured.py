"""A step's graph and what it closes over: what compiling and planning capture with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .capture import CaptureError, capture
from .program import Program
from .verify import check_purity


def captured(
    step: Callable[[Any, Any], Any], state: Any, batch: Any, traces: bool = False
) -> tuple[Program, list[Tensor]]:
    """A step's graph and what it closes over. Raises `CaptureError`, which names the user's line."""
    try:
        program = capture(step, state, batch, traces=traces)
        return program, check_purity(program)
    except CaptureError:
        if traces:
            raise
    return captured(step, state, batch, traces=True)  # the same again, knowing the lines


def dry_result(step: Callable[[Any, Any], Any], state: Any, batch: Any) -> Any:
    """What a dry run returns for a step that it does not look for: the state as it is, and ones."""
    program, _ = captured(step, state, batch)
    values = [node.meta["val"] for node in program.output.args[0][program.num_new :]]  # type: ignore[index,union-attr]
    aux = program.aux.spread([torch.ones(x.shape, dtype=x.dtype) for x in values])
    return aux if program.new_state is None else (state, aux)
