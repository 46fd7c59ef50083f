"""Capture for `compile` and `plan`: a step's graph and the tensors that it closes over."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .. import tree
from ..comm.current_mesh import axes_of
from ..graph.program import Program
from ..graph.same_graph import outline
from ..sharding.sharded import is_sharded, mesh_among
from ..util.user_line import user_line
from .advice import not_constant, swapped
from .capture import CaptureError, capture
from .data_sizes import bound_sizes
from .declare_same import share_batch
from .float8_products import float8_of, noted_products
from .idle_stages import warn_of_idle_stages
from .repeated_draws import warn_of_equal_draws
from .unused import noted_gradients, unused
from .verify import check_purity


def captured(
    step: Callable[[Any, Any], Any], state: Any, batch: Any, traces: bool = False
) -> tuple[Program, list[Tensor]]:
    """Return a step's graph and the tensors that it closes over.

    Raises `CaptureError`, which names the user's line. Warns, at one rank, of what more ranks refuse.
    """
    name = getattr(step, "__name__", "the step")
    wrong = swapped(name, state, batch) or not_constant(name, "state", state) or not_constant(name, "batch", batch)
    if wrong is not None:
        raise wrong
    mesh = mesh_among(tree.leaves((state, batch), is_leaf=is_sharded))
    try:
        with axes_of(mesh), noted_gradients() as seen, noted_products() as products:
            program = capture(step, state, batch, traces=traces)
        program.unused = unused(seen)
        program.float8 = float8_of(products)
        bound_sizes(program)
        constants = check_purity(program)
        share_batch(program)
        if not traces:
            warn_of_equal_draws(program, name)
            warn_of_idle_stages(program, name)
        if program.warning and not traces:
            with axes_of(mesh):
                again = capture(step, state, batch, traces=True)
            check_purity(again)
            line = user_line()
            where = ("zerofn", 0) if line is None else (line.file, line.number)
            warnings.warn_explicit(f"{name}: {again.warning}", UserWarning, *where)
        return program, constants
    except CaptureError as error:
        if traces:
            raise
        unplaced = error
    try:
        return captured(step, state, batch, traces=True)  # once more, so that the error names the user's line
    except CaptureError:
        raise
    except Exception:  # functions that torch.compile runs cannot be watched
        raise unplaced from None


def captured_with_outline(
    step: Callable[[Any, Any], Any], state: Any, batch: Any, traces: bool = False
) -> tuple[Program, list[Tensor]]:
    """As `captured`, with the outline of the graph, to compare it with a later capture."""
    program, constants = captured(step, state, batch, traces)
    program.outline = outline(program.gm, program.aux.baked)
    return program, constants


def dry_result(step: Callable[[Any, Any], Any], state: Any, batch: Any) -> Any:
    """Return what a dry run returns in place of a step's results: the same state, and ones in the shapes of aux.

    `zerofn plan` uses it for the compiled steps of a script that are not the one to plan.
    """
    program, _ = captured(step, state, batch)
    values = [node.meta["val"] for node in program.output.args[0][program.num_new :]]  # type: ignore[index,union-attr]
    aux = program.aux.spread([torch.ones(x.shape, dtype=x.dtype) for x in values])
    return aux if program.new_state is None else (state, aux)
