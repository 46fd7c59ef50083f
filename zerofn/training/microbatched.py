"""`microbatched`: a function of rows, called on a part of them at a time."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from .. import tree
from .._torch_compat import current_trace
from ..capture.loop import in_parts, loop
from ..comm.current_mesh import axes_of
from ..graph.phase import FORWARD, phase
from ..random import fold_in, randomness
from ..random.mode import current_draw
from ..sharding.gather_scatter import gather
from ..sharding.sharded import is_sharded, mesh_among
from ..util.arguments import checked

B = TypeVar("B")
T = TypeVar("T")


@checked()
def microbatched(fn: Callable[[Any, B], T], n: int) -> Callable[[Any, B], T]:
    """Return `f(params, batch)`, which calls `fn` on `n` equal microbatches, one after another, and joins the
    results.

    For evaluation and prediction with the memory of one microbatch. `fn(params, batch)` receives full parameters, in
    the compute dtype, for each `Sharded` in `params`, and one of `n` equal blocks of rows, in order; it returns a tree
    of tensors, which `f` concatenates along dim 0. On a mesh with `pipe`, a compiled step runs the microbatches through
    the stages of a pipeline, and every rank gets the whole result. A microbatch sees the buffers that the previous one
    wrote. Random draws differ between microbatches (`zerofn.random.randomness`).

    A captured step loops over microbatches, and gathers units before their use in each; an eager call gathers them
    once. All ranks must call `f` if `params` has a `Sharded`. `f` is not differentiable, and raises `RuntimeError` if a
    gradient would be recorded through it. It raises `ValueError` if `n` does not divide the number of rows or a result
    is a scalar, and `TypeError` if a result is not a tensor.

    >>> predict = microbatched(lambda w, x: x @ w, 2)
    >>> predict(torch.ones(3, 1), torch.ones(4, 3)).shape
    torch.Size([4, 1])
    """
    if n < 1:
        raise ValueError(f"microbatched: n must be a positive integer, got {n!r}.")

    @functools.wraps(fn)
    def run(params: Any, batch: Any) -> Any:
        _check_no_gradient((params, batch))
        leaves, treedef = tree.flatten(batch)
        parts = [in_parts("microbatched", x, n) if isinstance(x, Tensor) else x for x in leaves]
        draw = current_draw()
        key = None if draw is None else fold_in(*draw)
        once = None if current_trace() is not None else gather(params)

        def body(index: Tensor, mine: list[Tensor]) -> tuple[list[Tensor], Any, None]:
            fresh = iter(mine)
            rows = tree.unflatten(treedef, [next(fresh) if isinstance(x, Tensor) else x for x in leaves])
            full = gather(params) if once is None else once
            with phase(FORWARD), randomness(None if key is None else fold_in(key, index)):
                return [], tree.tree_map(_checked_result, fn(full, rows)), None

        with torch.no_grad(), axes_of(mesh_among(tree.leaves((params, batch), is_leaf=is_sharded))):
            _, stacks, _ = loop(body, n, [x for x in parts if isinstance(x, Tensor)])
            return tree.tree_map(lambda x: x.flatten(0, 1), stacks)

    return run


def _check_no_gradient(given: Any) -> None:
    if torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in tree.leaves(given)):
        raise RuntimeError(
            "microbatched: the parameters or the batch require gradients, which microbatched does not compute. To "
            "train on microbatches, write zerofn.accumulate(state.value_and_grad(loss_fn), n)(batch). For a "
            "prediction, call it under torch.no_grad(), or on x.detach()."
        )


def _checked_result(x: Any) -> Any:
    if not isinstance(x, Tensor):
        raise TypeError(
            f"microbatched: fn returned a {type(x).__name__}, but only tensors can be concatenated. Return tensors."
        )
    if x.dim() == 0:
        raise ValueError(
            "microbatched: fn returned a scalar, but results are concatenated along dim 0. Return one value for each "
            "row, or x.unsqueeze(0) for one value for each microbatch."
        )
    return x
