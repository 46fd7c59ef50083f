"""What a loss function returns by mistake: a loss that trains nothing, and a metric in the place of a weight."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

from torch import Tensor

from .._torch_compat import bound_node, current_trace


def check_gradient(loss: Tensor, wanted: Sequence[Tensor]) -> None:
    """Raise `ValueError` if the loss has no gradient, though parameters are trained."""
    if wanted and not loss.requires_grad:
        raise ValueError(
            "value_and_grad: the loss has no gradient, so no parameter would be trained: it was detached, computed "
            "under torch.no_grad(), turned into integers or taken from a number. Return the tensor that is computed "
            "from the parameters; call the loss function itself where no gradient is meant."
        )


def warn_of_weight(weight: Tensor, wanted: Sequence[Tensor]) -> None:
    """Warn of a weight that is computed from the parameters: most likely a metric.

    Outside of a capture only one with a gradient can be told.
    """
    if weight.requires_grad or _depends(weight, wanted):
        warnings.warn(
            "value_and_grad: loss_fn returned (loss, x), and x depends on the parameters. Without has_aux, x is the "
            "weight of the loss, such as a number of tokens, and the loss is divided by it. If it is a metric, write "
            "value_and_grad(loss_fn, has_aux=True).",
            UserWarning,
            stacklevel=2,
        )


def _depends(x: Tensor, on: Sequence[Tensor]) -> bool:
    """Return whether a trace computes floating-point `x` from one of these tensors."""
    trace = current_trace()
    start = None if trace is None or not x.is_floating_point() else bound_node(trace.tracer, x)
    if trace is None or start is None:
        return False
    sources = {bound_node(trace.tracer, t) for t in on} - {None}
    seen, todo = set(), [start]
    while todo:
        node = todo.pop()
        if node in sources:
            return True
        if node not in seen:
            seen.add(node)
            todo += node.all_input_nodes
    return False
