"""Schedules with a warm-up: optax's and DeepSpeed's."""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
from torch import Tensor

from ..util.arguments import checked, known_arguments
from . import checks
from .schedules import Schedule, cosine_decay_schedule, exponential_decay, join_schedules, linear_schedule

WarmupType = Literal["log", "linear"]


@known_arguments
def warmup_constant_schedule(init_value: float, peak_value: float, warmup_steps: int) -> Schedule:
    """A straight line from `init_value` to `peak_value` over `warmup_steps`, then constant.

    >>> rate = warmup_constant_schedule(0.0, 1.0, 10)
    >>> [round(float(rate(torch.tensor(step))), 3) for step in (0, 5, 10)]
    [0.0, 0.5, 1.0]
    """
    where = "warmup_constant_schedule"
    checks.number(where, init_value=init_value, peak_value=peak_value, warmup_steps=warmup_steps)
    return linear_schedule(init_value, peak_value, warmup_steps)


@known_arguments
def warmup_cosine_decay_schedule(
    init_value: float,
    peak_value: float,
    warmup_steps: int,
    decay_steps: int,
    end_value: float = 0.0,
    exponent: float = 1.0,
) -> Schedule:
    """A straight line from `init_value` to `peak_value` over `warmup_steps`, then half a cosine to `end_value`.

    `decay_steps` includes `warmup_steps`. `exponent`: as in `cosine_decay_schedule`. Raises `ValueError` unless
    `decay_steps` is more than `warmup_steps`.

    >>> from zerofn import optim
    >>> schedule = optim.warmup_cosine_decay_schedule(0.0, 1.0, warmup_steps=10, decay_steps=110)
    >>> [schedule(count) for count in (5, 10, 60, 110)]
    [0.5, 1.0, 0.5, 0.0]
    """
    where = "warmup_cosine_decay_schedule"
    checks.number(where, init_value=init_value, peak_value=peak_value, end_value=end_value)
    checks.number(where, warmup_steps=warmup_steps, decay_steps=decay_steps)
    if not decay_steps > warmup_steps:
        raise ValueError(
            f"{where}: decay_steps includes the warm-up, so it must be more than warmup_steps={warmup_steps!r}; got "
            f"{decay_steps!r}."
        )
    alpha = 0.0 if peak_value == 0.0 else end_value / peak_value
    decay = cosine_decay_schedule(peak_value, decay_steps - warmup_steps, alpha, exponent)
    joined = join_schedules([linear_schedule(init_value, peak_value, warmup_steps), decay], [warmup_steps])
    return Schedule(where, (init_value, peak_value, warmup_steps, decay_steps, end_value, exponent), joined.fn)


@checked("staircase")
def warmup_exponential_decay_schedule(
    init_value: float,
    peak_value: float,
    warmup_steps: int,
    transition_steps: int,
    decay_rate: float,
    transition_begin: int = 0,
    staircase: bool = False,
    end_value: float | None = None,
) -> Schedule:
    """A straight line from `init_value` to `peak_value` over `warmup_steps`, then `exponential_decay`.

    The decay starts at `peak_value`, counts from the end of the warm-up, and takes the other arguments.

    >>> rate = warmup_exponential_decay_schedule(0.0, 1.0, 5, 5, 0.5)
    >>> [round(float(rate(torch.tensor(step))), 3) for step in (0, 5, 10)]
    [0.0, 1.0, 0.5]
    """
    where = "warmup_exponential_decay_schedule"
    checks.number(where, init_value=init_value, peak_value=peak_value, warmup_steps=warmup_steps)
    decay = exponential_decay(peak_value, transition_steps, decay_rate, transition_begin, staircase, end_value)
    joined = join_schedules([linear_schedule(init_value, peak_value, warmup_steps), decay], [warmup_steps])
    args = (init_value, peak_value, warmup_steps, transition_steps, decay_rate, transition_begin, staircase, end_value)
    return Schedule("warmup_exponential_decay_schedule", args, joined.fn)


@known_arguments
def warmup_lr(
    warmup_min_lr: float = 0.0,
    warmup_max_lr: float = 0.001,
    warmup_num_steps: int = 1000,
    warmup_type: WarmupType = "log",
) -> Schedule:
    """DeepSpeed's WarmupLR: min + (max - min) * gamma.

    With i = max(count - 1, 0) and N = max(2, warmup_num_steps), gamma is ln(i + 1) / ln(N) ("log") or i / N
    ("linear") while i < N, and 1 after. DeepSpeed's scheduler steps after the optimizer, hence the 1: the first two
    updates both run at `warmup_min_lr`. Raises `ValueError` unless `warmup_num_steps` is positive, and for an
    unknown `warmup_type`.

    >>> rate = warmup_lr(0.0, 1.0, 10, "linear")
    >>> [round(float(rate(torch.tensor(step))), 3) for step in (0, 5, 10)]
    [0.0, 0.4, 0.9]
    """
    args = (warmup_min_lr, warmup_max_lr, warmup_num_steps, warmup_type)
    return _warmup("warmup_lr", args, lambda i: torch.ones_like(i))


@known_arguments
def warmup_decay_lr(
    total_num_steps: int,
    warmup_min_lr: float = 0.0,
    warmup_max_lr: float = 0.001,
    warmup_num_steps: int = 1000,
    warmup_type: WarmupType = "log",
) -> Schedule:
    """DeepSpeed's WarmupDecayLR: `warmup_lr`, then a straight line down to `warmup_min_lr`.

    With i, N and gamma as in `warmup_lr`, and T = total_num_steps, gamma is max(0, (T - i) / max(1, T - N)) for i >= N.
    Raises as `warmup_lr` does, and `ValueError` unless `total_num_steps` is positive.

    >>> rate = warmup_decay_lr(20, 0.0, 1.0, 10, "linear")
    >>> [round(float(rate(torch.tensor(step))), 3) for step in (0, 5, 10)]
    [0.0, 0.4, 0.9]
    """
    checks.number("warmup_decay_lr", 0, above=True, total_num_steps=total_num_steps, warmup_num_steps=warmup_num_steps)
    width = max(1, total_num_steps - max(2, warmup_num_steps))
    args = (warmup_min_lr, warmup_max_lr, warmup_num_steps, warmup_type)
    return _warmup("warmup_decay_lr", args, lambda i: ((total_num_steps - i) / width).clamp(min=0), total_num_steps)


def _warmup(name: str, args: tuple[Any, ...], after: Any, *more: Any) -> Schedule:
    low, high, num_steps, kind = args
    checks.number(name, 0.0, warmup_min_lr=low, warmup_max_lr=high)
    checks.number(name, 0, above=True, warmup_num_steps=num_steps)
    if kind not in ("log", "linear"):
        raise ValueError(f"{name}: warmup_type must be 'log' or 'linear', got {kind!r}.")
    steps = max(2, num_steps)

    def fn(count: Tensor) -> Tensor:
        i = (count - 1).clamp(min=0)
        gamma = torch.log(i + 1) / math.log(steps) if kind == "log" else i / steps
        return low + (high - low) * torch.where(i < steps, gamma, after(i))

    return Schedule(name, (*more, *args), fn)
