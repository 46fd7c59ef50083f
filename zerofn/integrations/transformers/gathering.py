"""accelerate's transfers inside a captured step: an accelerator's `gather` is one of the step's operations there."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor

import zerofn


@contextlib.contextmanager
def gathered_in_step(accelerator: Any) -> Iterator[None]:
    """Inside, what an `Accelerator` gathers and reduces is gathered and reduced by the step, at every run.

    `gather_for_metrics` leaves out no rows of a last batch, which a step knows nothing of.
    """
    own = {"gather": _gather, "gather_for_metrics": _gather, "reduce": _reduce}
    vars(accelerator).update(own)
    try:
        yield
    finally:
        for name in own:
            del vars(accelerator)[name]


def _gather(x: Any, use_gather_object: bool = False) -> Any:
    if zerofn.world_size() == 1:
        return x
    return zerofn.tree_map(lambda v: zerofn.collectives.all_gather(v if v.dim() else v[None]), x)


_REDUCED: dict[str, Callable[[Tensor], Tensor]] = {
    "sum": lambda v: v.sum(0),
    "mean": lambda v: v.sum(0) / len(v),
    "max": lambda v: v.amax(0),
}


def _reduce(x: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
    if reduction == "none":
        return x
    return zerofn.tree_map(lambda v: _REDUCED[reduction](zerofn.collectives.all_gather(v[None])), x)
