"""Sums inside of `value_and_grad`, which averages gradients over the ranks that have other parts of the batch.

The derivative of `psum` is that of one value, which all ranks go on with alike. Where gradients are averaged, each rank
has a loss of its own, and the sum enters into all of them: a rank's value then has the derivatives of all, which
`all_reduce` sums. With `psum` it would be 1/n of that. It is right along such an axis in one case: if all that is
differentiated has come through `vary`, whose derivative sums over the ranks before gradients are averaged.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..comm.axes import kind_of
from ..comm.mesh import Axis
from .maps import Vary, heard_now


def check_psum(x: Tensor, axis: Axis) -> None:
    """Raise `ValueError` in a loss function if a `psum` of `x` over this axis would make gradients too small."""
    names = {name for name in axis.names if kind_of(name).batch}
    if heard_now() is None or not names or not _reaches_parameters(x, names):
        return
    raise ValueError(
        f"psum over {axis.name!r} in a loss function: value_and_grad averages gradients over these {axis.size} ranks, "
        f"so gradients would be {axis.size} times too small. Write zerofn.collectives.mean(x), or all_reduce(x) for a "
        "sum. Or leave psum out: value_and_grad also averages the loss."
    )


def _reaches_parameters(x: Tensor, names: set[str]) -> bool:
    """Return whether a path of derivatives leads from `x` to a leaf without a `vary` over these axes."""
    todo: list[Any] = [x.grad_fn]
    seen: set[Any] = set()
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        op = getattr(node, "op", None)
        if isinstance(op, Vary) and names <= set(op.axis.names):
            continue
        if not node.next_functions:
            return True
        todo += [following for following, _ in node.next_functions]
    return x.grad_fn is None
