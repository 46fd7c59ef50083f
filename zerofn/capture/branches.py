"""`torch.cond` while a step is captured: its branches take and return flat lists of tensors.

torch compiles the branches for that, but not where a mode sees every operation, as in the loop of `accumulate`. There
the gradient of a branch that returns one tensor fails.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from .._torch_compat import tree_flatten, tree_unflatten
from ..util.patches import Patches


def _flat(cond: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(cond)
    def flat(pred: Any, true_fn: Callable[..., Any], false_fn: Callable[..., Any], operands: Any = ()) -> Any:
        given, taken = tree_flatten(operands)
        if not isinstance(pred, Tensor) or not all(isinstance(x, Tensor) for x in given):
            return cond(pred, true_fn, false_fn, operands)
        returned: list[Any] = []

        def branch(fn: Callable[..., Any]) -> Callable[..., Sequence[Any]]:
            def run(*inputs: Any) -> Sequence[Any]:
                out, spec = tree_flatten(fn(*tree_unflatten(inputs, taken)))
                returned.append(spec)
                return tuple(out)

            return run

        found = torch.ops.higher_order.cond(pred, branch(true_fn), branch(false_fn), tuple(given))
        return tree_unflatten(found, returned[-1])

    return flat


branches = Patches(lambda: [(torch, "cond", _flat)])
