"""What rules with one operation a unit share: AdamW, SGD, Lion."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from .base import Apply, GradientTransformation, LeafInfo, Mask, ScalarOrSchedule, rate_at
from .runs import map_runs

Decay = Callable[[LeafInfo], float]


def decay_by(weight_decay: float, mask: Mask | None) -> Decay:
    """A leaf's weight decay: `weight_decay` where `mask(leaf)` is true, everywhere without one."""
    return lambda leaf: float(weight_decay) if mask is None or mask(leaf) else 0.0


def fused_step(
    call: Callable[[list[Tensor], tuple[Any, ...], Tensor], Sequence[Tensor]],
    learning_rate: ScalarOrSchedule,
    decay_of: Decay,
    count: Tensor,
    trees: Sequence[Any],
    factor: Tensor | None,
    finite: Tensor | None,
) -> tuple[Tensor, list[Any]]:
    """`call(tensors, runs, count)` on every unit of `trees` (parameters, gradients, moments).

    `runs` are the arguments of `ops.rule`. -> the next count, the new parameters and moments.
    """
    rate = rate_at(learning_rate, count)
    lr, base = (rate, 1.0) if isinstance(rate, Tensor) else (None, float(rate))
    after = count + (1 if finite is None else finite)

    def rule(tensors: list[Tensor], starts: list[int], stops: list[int], decays: list[float]) -> Any:
        return call(tensors, (lr, factor, finite, starts, stops, [base] * len(starts), decays), after)

    fresh = map_runs(rule, decay_of, *trees)
    return after, fresh or [trees[0], *trees[2:]]


def fused_rule(
    name: str,
    args: tuple[Any, ...],
    init: Callable[[Any], Any],
    update: Callable[..., tuple[Any, Any]],
    apply: Apply,
    learning_rate: ScalarOrSchedule,
    decay_of: Decay | None,
) -> GradientTransformation:
    """The transformation; `decay_of` where decay differs among leaves."""
    return GradientTransformation(
        init,
        update,
        name,
        args,
        apply=apply,
        label=decay_of,
        by_runs=True,
        learning_rate=lambda state: rate_at(learning_rate, state.count),
    )
