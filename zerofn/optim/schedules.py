"""optax's schedules: functions of the count of applied updates, in torch operations alone.

A step can capture them, and none waits for the device. Their values are optax's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..util.arguments import checked, known_arguments
from . import checks
from .as_code import as_code


@dataclass(frozen=True)
class Schedule:
    """A function of the count of applied updates.

    `schedule(count)` takes an int64 scalar tensor and returns a float64 scalar tensor on its device; it takes an
    int and returns a float. Two schedules are equal if their names and arguments are. `fn`: the function of a count
    that is a float64 scalar tensor.

    >>> halves = Schedule("halves", (), lambda count: 0.5**count)
    >>> halves(3), halves(torch.tensor(3))
    (0.125, tensor(0.1250, dtype=torch.float64))
    """

    name: str
    args: tuple[Any, ...]
    fn: Callable[[Tensor], Tensor] = field(compare=False, repr=False)

    def __call__(self, count: Tensor | int) -> Any:
        if isinstance(count, Tensor):
            return self.fn(count.to(torch.float64))
        return float(self.fn(torch.tensor(count, dtype=torch.float64)))

    def __repr__(self) -> str:
        return as_code(self.name, self.args)


@known_arguments
def constant_schedule(value: float) -> Schedule:
    """`value` at every count. Raises `TypeError` if it is not a number.

    >>> rate = constant_schedule(0.1)
    >>> [round(float(rate(torch.tensor(step))), 3) for step in (0, 5, 10)]
    [0.1, 0.1, 0.1]
    """
    checks.number("constant_schedule", value=value)
    return Schedule("constant_schedule", (value,), lambda count: torch.full_like(count, value))


@known_arguments
def polynomial_schedule(
    init_value: float, end_value: float, power: float, transition_steps: int, transition_begin: int = 0
) -> Schedule:
    """A polynomial from `init_value` to `end_value`: (init - end) * (1 - t / transition_steps)^power + end.

    t is count - transition_begin, clamped to [0, transition_steps]. With `transition_steps` <= 0 the value stays
    `init_value`. Raises `TypeError` for an argument that is not a number.

    >>> rate = polynomial_schedule(1.0, 0.0, 2, 10)
    >>> [round(float(rate(torch.tensor(step))), 3) for step in (0, 5, 10)]
    [1.0, 0.25, 0.0]
    """
    checks.number("polynomial_schedule", init_value=init_value, end_value=end_value, power=power)
    checks.number("polynomial_schedule", transition_steps=transition_steps, transition_begin=transition_begin)
    args = (init_value, end_value, power, transition_steps, transition_begin)

    def fn(count: Tensor) -> Tensor:
        if transition_steps <= 0:
            return torch.full_like(count, init_value)
        t = (count - max(transition_begin, 0)).clamp(0, transition_steps)
        return (init_value - end_value) * (1 - t / transition_steps) ** power + end_value

    return Schedule("polynomial_schedule", args, fn)


@known_arguments
def linear_schedule(init_value: float, end_value: float, transition_steps: int, transition_begin: int = 0) -> Schedule:
    """A straight line from `init_value` to `end_value`: `polynomial_schedule` with power 1.

    >>> from zerofn import optim
    >>> [optim.linear_schedule(0.0, 1.0, 4, transition_begin=10)(count) for count in (0, 11, 20)]
    [0.0, 0.25, 1.0]
    """
    return polynomial_schedule(init_value, end_value, 1, transition_steps, transition_begin)


@checked("staircase")
def exponential_decay(
    init_value: float,
    transition_steps: int,
    decay_rate: float,
    transition_begin: int = 0,
    staircase: bool = False,
    end_value: float | None = None,
) -> Schedule:
    """Exponential decay: init_value * decay_rate^((count - transition_begin) / transition_steps).

    Before `transition_begin` the value is `init_value`. `staircase` rounds the exponent down. `end_value` is a
    lower bound if `decay_rate` < 1, else an upper bound. With `transition_steps` <= 0 or `decay_rate` 0 the value
    stays `init_value`. Raises `ValueError` for a negative `decay_rate`.

    >>> rate = exponential_decay(1.0, 10, 0.5)
    >>> [round(float(rate(torch.tensor(step))), 3) for step in (0, 5, 10)]
    [1.0, 0.707, 0.5]
    """
    where = "exponential_decay"
    checks.number(where, init_value=init_value, transition_steps=transition_steps, transition_begin=transition_begin)
    checks.number(where, 0.0, decay_rate=decay_rate)
    bound = {} if end_value is None else {"min" if decay_rate < 1 else "max": end_value}
    checks.number(where, end_value=init_value if end_value is None else end_value)

    def fn(count: Tensor) -> Tensor:
        if transition_steps <= 0 or decay_rate == 0:
            return torch.full_like(count, init_value)
        t = (count - max(transition_begin, 0)).clamp(min=0) / transition_steps
        value = init_value * torch.pow(decay_rate, t.floor() if staircase else t)
        return value.clamp(**bound) if bound else value

    args = (init_value, transition_steps, decay_rate, transition_begin, staircase, end_value)
    return Schedule(where, args, fn)


@known_arguments
def cosine_decay_schedule(init_value: float, decay_steps: int, alpha: float = 0.0, exponent: float = 1.0) -> Schedule:
    """Half a cosine: init_value * ((1 - alpha) * ((1 + cos(pi t / decay_steps)) / 2)^exponent + alpha).

    t is min(count, decay_steps), so the value ends at alpha * init_value (Loshchilov and Hutter 2017). Raises
    `ValueError` unless `decay_steps` is positive.

    >>> from zerofn import optim
    >>> [optim.cosine_decay_schedule(1.0, 100, alpha=0.1)(count) for count in (0, 50, 100, 200)]
    [1.0, 0.55, 0.1, 0.1]
    """
    checks.number("cosine_decay_schedule", init_value=init_value, alpha=alpha, exponent=exponent)
    checks.number("cosine_decay_schedule", 0, above=True, decay_steps=decay_steps)

    def fn(count: Tensor) -> Tensor:
        cosine = 0.5 * (1 + torch.cos(math.pi * count.clamp(max=decay_steps) / decay_steps))
        return init_value * ((1 - alpha) * cosine**exponent + alpha)

    return Schedule("cosine_decay_schedule", (init_value, decay_steps, alpha, exponent), fn)


@checked("boundaries_and_scales")
def piecewise_constant_schedule(
    init_value: float, boundaries_and_scales: Mapping[int, float] | None = None
) -> Schedule:
    """Steps: `init_value` times the scales of all boundaries <= count.

    `boundaries_and_scales`: a dict {boundary: scale}. Raises `ValueError` for a negative scale.

    >>> from zerofn import optim
    >>> [optim.piecewise_constant_schedule(1.0, {10: 0.5, 20: 0.5})(count) for count in (9, 10, 20)]
    [1.0, 0.5, 0.25]
    """
    scales = tuple(sorted((boundaries_and_scales or {}).items()))
    checks.number("piecewise_constant_schedule", init_value=init_value)
    for boundary, scale in scales:
        checks.number(f"piecewise_constant_schedule: at {boundary}", 0.0, scale=scale)

    def fn(count: Tensor) -> Tensor:
        value = torch.full_like(count, init_value)
        for boundary, scale in scales:
            value = torch.where(count < boundary, value, value * scale)
        return value

    return Schedule("piecewise_constant_schedule", (init_value, scales), fn)


@checked()
def join_schedules(schedules: Sequence[Callable[..., Any]], boundaries: Sequence[int]) -> Schedule:
    """One schedule after another.

    From `boundaries[i - 1]` on, the value is `schedules[i](count - boundaries[i - 1])`. Raises `ValueError` unless n
    schedules have n - 1 boundaries, `TypeError` for an entry that is not a function.

    >>> rate = join_schedules([constant_schedule(1.0), constant_schedule(0.5)], [5])
    >>> [round(float(rate(torch.tensor(step))), 3) for step in (0, 5, 10)]
    [1.0, 0.5, 0.5]
    """
    if len(boundaries) != len(schedules) - 1:
        raise ValueError(
            f"join_schedules: {len(schedules)} schedules need {len(schedules) - 1} boundaries between "
            f"them, got {list(boundaries)!r}."
        )
    for k, schedule in enumerate(schedules):
        if not callable(schedule):
            raise TypeError(
                f"join_schedules: schedules[{k}] must be a schedule, got {schedule!r}. For a constant, write "
                f"constant_schedule({schedule!r})."
            )

    def fn(count: Tensor) -> Tensor:
        value = torch.as_tensor(schedules[0](count))
        for boundary, schedule in zip(boundaries, schedules[1:], strict=True):
            value = torch.where(count < boundary, value, schedule(count - boundary))
        return value

    return Schedule("join_schedules", (tuple(schedules), tuple(boundaries)), fn)
