"""Schedules that rise and fall, once or in cycles."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from ..util.arguments import checked, known_arguments
from . import checks
from .schedules import Schedule, join_schedules
from .warmup import warmup_cosine_decay_schedule


@known_arguments
def cosine_onecycle_schedule(
    transition_steps: int,
    peak_value: float,
    pct_start: float = 0.3,
    div_factor: float = 25.0,
    final_div_factor: float = 1e4,
) -> Schedule:
    """One cycle: half a cosine up to `peak_value`, then half a cosine down (Smith and Topin 2018).

    The value starts at peak_value / div_factor and reaches `peak_value` after the first `pct_start` of
    `transition_steps`. At `transition_steps` it is peak_value / (div_factor * final_div_factor), and stays there.
    optax and `torch.optim.lr_scheduler.OneCycleLR` do the same. Raises `ValueError` unless `transition_steps` and
    both factors are positive and `pct_start` is in [0, 1).

    >>> from zerofn import optim
    >>> schedule = optim.cosine_onecycle_schedule(100, 1.0)
    >>> [round(schedule(count), 6) for count in (0, 30, 100)]
    [0.04, 1.0, 4e-06]
    """
    where = "cosine_onecycle_schedule"
    checks.number(where, peak_value=peak_value)
    checks.number(where, 0, above=True, transition_steps=transition_steps)
    checks.number(where, 0.0, above=True, div_factor=div_factor, final_div_factor=final_div_factor)
    checks.number(where, 0.0, below=1.0, pct_start=pct_start)
    top, end = int(pct_start * transition_steps), int(transition_steps)
    low, last = peak_value / div_factor, peak_value / (div_factor * final_div_factor)

    def between(a: float, b: float, t: Tensor) -> Tensor:
        return b + (a - b) / 2 * (torch.cos(math.pi * t) + 1)

    def fn(count: Tensor) -> Tensor:
        up = between(low, peak_value, count / max(top, 1))
        down = between(peak_value, last, (count - top) / max(end - top, 1))
        return torch.where(count < top, up, torch.where(count < end, down, torch.full_like(count, last)))

    return Schedule(where, (transition_steps, peak_value, pct_start, div_factor, final_div_factor), fn)


@checked()
def sgdr_schedule(cosine_kwargs: Iterable[Mapping[str, Any]]) -> Schedule:
    """Warm restarts: one `warmup_cosine_decay_schedule` after another (Loshchilov and Hutter 2017).

    `cosine_kwargs`: for each cycle a dict of that schedule's arguments. A cycle is `decay_steps` long. Raises
    `ValueError` for an empty list, `TypeError` for arguments that the schedule does not have.

    >>> from zerofn import optim
    >>> cycle = {"init_value": 0.0, "peak_value": 1.0, "warmup_steps": 10, "decay_steps": 100}
    >>> [optim.sgdr_schedule([cycle, cycle])(count) for count in (10, 100, 110)]
    [1.0, 0.0, 1.0]
    """
    cycles = tuple(dict(kwargs) for kwargs in cosine_kwargs)
    if not cycles:
        raise ValueError(
            "sgdr_schedule: expected a list with at least one dict, the arguments of a cycle; got an empty list."
        )
    schedules, boundaries = [], [0]
    for k, kwargs in enumerate(cycles):
        try:
            schedules.append(warmup_cosine_decay_schedule(**kwargs))
        except TypeError as error:
            raise TypeError(f"sgdr_schedule: cosine_kwargs[{k}]: {error}") from None
        boundaries.append(boundaries[-1] + kwargs["decay_steps"])
    args = tuple(tuple(sorted(kwargs.items())) for kwargs in cycles)
    return Schedule("sgdr_schedule", (args,), join_schedules(schedules, boundaries[1:-1]).fn)
