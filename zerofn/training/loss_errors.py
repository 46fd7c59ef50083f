"""What a loss function returns by mistake, a loss that trains nothing or a metric in the place of a weight, and what a
step takes for gradients.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from .. import tree
from .._torch_compat import bound_node, current_trace
from ..sharding.rank_entries import of_ranks
from ..sharding.sharded import is_sharded
from ..util.arguments import told
from ..util.errors import some


def check_gradient(loss: Tensor, wanted: Sequence[Tensor]) -> None:
    """Raise `ValueError` if the loss has no gradient, though parameters are trained."""
    if wanted and not loss.requires_grad:
        raise ValueError(
            "value_and_grad: the loss has no gradient, so no parameter would be trained. It was detached, computed "
            "under torch.no_grad(), converted to integers, or made from a Python number. Return the tensor that is "
            "computed from the parameters. If you want no gradient, call the loss function itself."
        )


def warn_of_weight(weight: Tensor, wanted: Sequence[Tensor]) -> None:
    """Warn of a weight that is computed from the parameters: most likely a metric.

    Outside of a capture only one with a gradient can be told.
    """
    if weight.requires_grad or _depends(weight, wanted):
        warnings.warn(
            "value_and_grad: loss_fn returned (loss, x), and x depends on the parameters. Without has_aux, x is the "
            "weight of the loss, such as the number of tokens, and the loss is divided by x. If x is a metric, write "
            "value_and_grad(loss_fn, has_aux=True).",
            UserWarning,
            stacklevel=2,
        )


def check_gradients(params: Any, grads: Any) -> None:
    """Raise `TypeError` if these are not gradients of the parameters: a tree of the same names, shapes and shards."""
    said = _difference(params, grads)
    if said:
        raise TypeError(
            f"apply_gradients: {said}. Gradients have the names and shapes of state.params; write loss, grads = "
            "state.value_and_grad(loss_fn)(batch): the loss comes first."
        )


def _difference(params: Any, grads: Any) -> str:
    """Return what gradients lack or have too much, "" if they fit."""
    if grads is None or tree.structure(grads).is_leaf() and not tree.structure(params).is_leaf():
        one = f"one tensor of shape {tuple(grads.shape)}" if isinstance(grads, Tensor) else told(grads)
        return f"got {one} instead of a tree of gradients"
    ours, theirs = (
        {tree.name_of(path): x for path, x in zip(*tree.flatten_with_path(t, is_leaf=is_sharded)[:2], strict=True)}
        for t in (params, grads)
    )
    if any(map(is_sharded, ours.values())) and not any(map(is_sharded, theirs.values())):
        return (
            f"got a {type(grads).__name__} of full gradients, but the parameters are sharded; zerofn.scatter(grads, "
            "like=state.params) shards full gradients"
        )
    if ("" in ours) != ("" in theirs):
        return f"got a {type(grads).__name__}, but the parameters are a {type(params).__name__}"
    if missing := ours.keys() - theirs.keys():
        return f"the gradient of {some(sorted(missing))} is missing"
    if new := theirs.keys() - ours.keys():
        return f"got a gradient of {some(sorted(new))}, which is not a parameter"
    for name, p in ours.items():
        g, at = theirs[name], f" of {name!r}" if name else ""
        if not (isinstance(g, Tensor) or is_sharded(g)):
            return f"the gradient{at} is {told(g)}"
        if is_sharded(p) and is_sharded(g) and g.spec.of_ranks and g.layout == of_ranks(p.spec).layout:
            continue
        if tree.structure(p) != tree.structure(g):
            return f"the gradient{at} belongs to parameters with other names, shapes or shards"
        if isinstance(g, Tensor) and g.shape != p.shape:
            return f"the gradient{at} has shape {list(g.shape)}, but the parameter has shape {list(p.shape)}"
    return ""


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
