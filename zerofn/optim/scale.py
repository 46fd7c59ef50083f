"""Multiply by a number or a schedule."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import tree
from ..util.arguments import checked, known_arguments
from . import checks
from .base import About, EmptyState, Fused, GradientTransformation, ScalarOrSchedule, count_zero, no_state


class ScaleByScheduleState(NamedTuple):
    """The state of `scale_by_schedule`.

    `count`: applied updates, int64 scalar.

    >>> tx, grads = scale_by_schedule(lambda count: 0.5), {"w": torch.ones(2)}
    >>> tx.update(grads, tx.init(grads))[1]
    ScaleByScheduleState(count=tensor(1))
    """

    count: Tensor  # type: ignore[assignment]  # tuple.count gives way


@known_arguments
def scale(step_size: float) -> GradientTransformation:
    """Multiply by `step_size`. Raises `TypeError` if it is not a number.

    >>> tx, grads = scale(2.0), {"w": torch.tensor([3.0, 4.0])}
    >>> tx.update(grads, tx.init(grads))[0]
    {'w': tensor([6., 8.])}
    """
    checks.number("scale", step_size=step_size)

    def update(grads: Any, state: EmptyState, params: Any = None) -> tuple[Any, EmptyState]:
        return tree.tree_map(lambda g: g * step_size, grads), state

    def factor(grads: Any, so_far: Tensor | None) -> Tensor:
        return torch.full((), step_size, dtype=torch.float64) if so_far is None else so_far * step_size

    return GradientTransformation(no_state, update, About("scale", (step_size,)), fused=Fused(factor=factor))


@known_arguments
def scale_by_schedule(step_size_fn: Any) -> GradientTransformation:
    """Multiply by `step_size_fn(count)`, where `count` is the number of applied updates, an int64 scalar tensor.

    Raises `TypeError` if `step_size_fn` is not a function.

    >>> tx = scale_by_schedule(lambda count: 0.5 + 0 * count)
    >>> grads = {"w": torch.tensor([3.0, 4.0])}
    >>> tx.update(grads, tx.init(grads))[0]
    {'w': tensor([1.5000, 2.0000])}
    """
    if not callable(step_size_fn):
        raise TypeError(
            "scale_by_schedule: step_size_fn must be a function of the count of applied updates, got "
            f"{step_size_fn!r}. For a constant, write scale({step_size_fn!r})."
        )

    def init(params: Any) -> ScaleByScheduleState:
        return ScaleByScheduleState(count_zero(params))

    def update(grads: Any, state: ScaleByScheduleState, params: Any = None) -> tuple[Any, ScaleByScheduleState]:
        size = step_size_fn(state.count)
        return tree.tree_map(lambda g: (g * size).to(g.dtype), grads), ScaleByScheduleState(state.count + 1)

    return GradientTransformation(init, update, About("scale_by_schedule", (step_size_fn,)))


@checked("flip_sign")
def scale_by_learning_rate(learning_rate: ScalarOrSchedule, *, flip_sign: bool = True) -> GradientTransformation:
    """Multiply by minus the learning rate, a number or a schedule; without `flip_sign`, by plus the learning rate.

    Raises `ValueError` for a negative number, `TypeError` for an argument of the wrong type.

    >>> tx, grads = scale_by_learning_rate(0.1), {"w": torch.tensor([3.0, 4.0])}
    >>> tx.update(grads, tx.init(grads))[0]
    {'w': tensor([-0.3000, -0.4000])}
    """
    checks.learning_rate("scale_by_learning_rate", learning_rate)
    sign = -1 if flip_sign else 1
    if callable(learning_rate):
        of_count = learning_rate
        inner, rate = scale_by_schedule(lambda count: sign * of_count(count)), lambda state: of_count(state.count)
    else:
        inner, rate = scale(sign * learning_rate), lambda state: learning_rate
    return replace(inner, about=About("scale_by_learning_rate", (learning_rate, flip_sign), learning_rate=rate))
