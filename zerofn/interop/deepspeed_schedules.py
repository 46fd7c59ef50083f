"""DeepSpeed's schedules as functions of the count of applied updates.

DeepSpeed's scheduler steps after the optimizer, so its iteration is the count less one, and the first update runs at
what the scheduler sets when it is made. Formulas: deepspeed/runtime/lr_schedules.py of 0.19.8.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .. import optim
from ..optim import Schedule
from .deepspeed_file import Section


def schedule_of(block: Section, lr: float) -> Schedule | float:
    """Return the learning rate that `scheduler` says; `lr`, the optimizer's, where there is none.

    Raises `ValueError` for a schedule or a parameter that DeepSpeed does not have.
    """
    if "type" not in block.values:
        return lr
    make = block.word("type", _SCHEDULES)
    return make(block("params"), lr)


def _warmup(params: Section, lr: float) -> Schedule:
    params.only("warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "warmup_type", "last_batch_iteration")
    return optim.warmup_lr(*_rise(params, lr))


def _warmup_decay(params: Section, lr: float) -> Schedule:
    names = ("warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "warmup_type", "last_batch_iteration")
    params.only("total_num_steps", *names)
    return optim.warmup_decay_lr(_total(params), *_rise(params, lr))


def _rise(params: Section, lr: float) -> tuple[float, float, int, Any]:
    _from_the_start(params)
    low = params.number("warmup_min_lr", 0.0, 0.0)
    high = params.number("warmup_max_lr", lr, 0.0)
    steps = params.number("warmup_num_steps", 1000, 1, whole=True)
    return low, high, steps, params.word("warmup_type", ("log", "linear"), "log")


def _total(params: Section) -> int:
    if "total_num_steps" not in params.values:
        raise ValueError(f"from_deepspeed: {params.name}.total_num_steps is missing; it has no default.")
    return int(params.number("total_num_steps", None, 1, whole=True))


def _from_the_start(params: Section) -> None:
    if params.number("last_batch_iteration", -1) != -1:
        raise ValueError(
            f"from_deepspeed: {params.name}.last_batch_iteration has no counterpart: a schedule counts the updates of "
            "the state. Load a checkpoint instead."
        )


def _warmup_cosine(params: Section, lr: float) -> Schedule:
    names = ("warmup_min_ratio", "warmup_num_steps", "cos_min_ratio", "warmup_type", "last_batch_iteration")
    params.only("total_num_steps", *names)
    _from_the_start(params)
    total, low = _total(params), params.number("warmup_min_ratio", 0.0, 0.0)
    steps, end = params.number("warmup_num_steps", 1000, 1, whole=True), params.number("cos_min_ratio", 0.0001, 0.0)
    kind, width = params.word("warmup_type", ("log", "linear"), "log"), max(2, steps)

    def fn(count: Tensor) -> Tensor:
        i = (count - 1).clamp(min=0)
        rise = torch.log(i + 1) / math.log(width) if kind == "log" else i / width
        progress = ((i - width + 1) / max(1, total - width)).clamp(max=1.0)
        fall = (end + (1 - end) * (1 + torch.cos(math.pi * progress)) / 2).clamp(min=0.0)
        ratio = torch.where(i < width, low + (1 - low) * rise, fall)
        return lr * torch.where(count == 0, torch.zeros_like(count), ratio)

    return Schedule("deepspeed_warmup_cosine_lr", (total, low, steps, end, kind, lr), fn)


def _one_cycle(params: Section, lr: float) -> Schedule:
    cycle_names = ("cycle_first_step_size", "cycle_second_step_size", "cycle_first_stair_count")
    lr_names = ("cycle_second_stair_count", "decay_step_size", "cycle_min_lr", "cycle_max_lr", "decay_lr_rate")
    momentum = ("cycle_momentum", "cycle_min_mom", "cycle_max_mom", "decay_mom_rate", "last_batch_iteration")
    params.only(*cycle_names, *lr_names, *momentum)
    _from_the_start(params)
    if params.flag("cycle_momentum", True):
        raise ValueError(
            f'from_deepspeed: {params.name}: OneCycle changes the momentum too unless it says "cycle_momentum": false. '
            "Here momentum is a constant of the optimizer's kernel. Write "
            '"cycle_momentum": false, and choose betas yourself.'
        )
    for name in ("cycle_min_lr", "cycle_max_lr"):
        if name not in params.values:
            raise ValueError(f"from_deepspeed: {params.name}.{name} is missing; it has no default.")
    low, high = params.number("cycle_min_lr", None, 0.0), params.number("cycle_max_lr", None, 0.0)
    rate, size = params.number("decay_lr_rate", 0.0), params.number("decay_step_size", 0, 0)
    cycle, total = _cycle(params)

    def fn(count: Tensor) -> Tensor:
        after = low / (1 + rate * (count - total) / size) if size and rate else torch.full_like(count, low)
        return torch.where(count < total + 1, low + (high - low) * cycle(count), after)

    return Schedule("deepspeed_one_cycle", (low, high, rate, size, *_shape(params)), fn)


def _shape(params: Section) -> tuple[float, float, int, int]:
    first = params.number("cycle_first_step_size", 2000.0)
    second = params.number("cycle_second_step_size", first)
    for name, value in (("cycle_first_step_size", first), ("cycle_second_step_size", second)):
        if not value > 0:
            raise ValueError(f"from_deepspeed: {params.name}.{name} must be above 0, got {value!r}.")
    stairs = params.number("cycle_first_stair_count", 0, 0, whole=True)
    return first, second, stairs, params.number("cycle_second_stair_count", stairs, 0, whole=True)


def _cycle(params: Section) -> tuple[Callable[[Tensor], Tensor], float]:
    """Return (height of the cycle at a count, from 0 to 1; the counts of a cycle)."""
    first, second, *stairs = _shape(params)
    total = first + second

    def height(count: Tensor) -> Tensor:
        at = count % total
        up, down = at / first, (total - at) / second
        up, down = (torch.floor(x * n) / n if n else x for x, n in zip((up, down), stairs, strict=True))
        return torch.where(at <= first, up, down)

    return height, total


def _range_test(params: Section, lr: float) -> Schedule:
    names = ("lr_range_test_min_lr", "lr_range_test_step_size", "lr_range_test_step_rate", "lr_range_test_staircase")
    params.only(*names, "last_batch_iteration")
    _from_the_start(params)
    low, rate = params.number(names[0], 1e-3, 0.0), params.number(names[2], 1.0)
    size, stairs = params.number(names[1], 2000, 1, whole=True), params.flag(names[3])

    def fn(count: Tensor) -> Tensor:
        return low * (1 + rate * (torch.floor(count / size) if stairs else count / size))

    return Schedule("deepspeed_lr_range_test", (low, rate, size, stairs), fn)


_SCHEDULES: dict[str, Callable[[Section, float], Any]] = {
    "WarmupLR": _warmup,
    "WarmupDecayLR": _warmup_decay,
    "WarmupCosineLR": _warmup_cosine,
    "OneCycle": _one_cycle,
    "LRRangeTest": _range_test,
}
