"""Loss scales, after jmp: frozen pytrees. No method waits for the device.

float16 rounds numbers below 3e-8 to zero. So the loss is multiplied by a scale before the backward pass, and gradients
are divided by it afterwards (Micikevicius et al. 2018, Mixed Precision Training, section 3.2).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .. import tree
from ..util.arguments import check_fields, known_fields, told


@dataclass(frozen=True)
class NoLossScale:
    """A loss scale of 1, without effect.

    >>> NoLossScale().scale(torch.tensor(2.0))
    tensor(2.)
    """

    @property
    def loss_scale(self) -> float:
        """1.0, always."""
        return 1.0

    def scale(self, values: Any) -> Any:
        """Return `values` unchanged."""
        return values

    def unscale(self, values: Any) -> Any:
        """Return `values` unchanged."""
        return values

    def adjust(self, finite: Tensor) -> NoLossScale:
        """Return this loss scale. `finite` has no effect."""
        return self


@known_fields
@dataclass(frozen=True)
class StaticLossScale:
    """A constant loss scale.

    `loss_scale`: a float, stored as a float32 scalar tensor.

    >>> scale = StaticLossScale(8.0)
    >>> scale.scale(torch.tensor(2.0)), scale.unscale({"w": torch.tensor(16.0)})
    (tensor(16.), {'w': tensor(2.)})
    """

    loss_scale: Any

    def __post_init__(self) -> None:
        object.__setattr__(self, "loss_scale", _scalar(self, "loss_scale", self.loss_scale, torch.float32))

    def scale(self, values: Any) -> Any:
        """Return `values` with every leaf multiplied by the scale, in its dtype."""
        return tree.tree_map(lambda x: x * self.loss_scale.to(x.dtype), values)

    def unscale(self, values: Any) -> Any:
        """Return `values` with every leaf multiplied by one over the scale.

        float16 leaves become float32, because unscaled values may be too small for float16.
        """
        inverse = 1.0 / self.loss_scale

        def unscaled(x: Tensor) -> Tensor:
            x = x.float() if x.dtype == torch.float16 else x
            return x * inverse.to(x.dtype)

        return tree.tree_map(unscaled, values)

    def adjust(self, finite: Tensor) -> Any:
        """Return this loss scale. `finite` has no effect."""
        return self


@known_fields
@dataclass(frozen=True)
class DynamicLossScale(StaticLossScale):
    """A loss scale that grows after finite steps and shrinks after others (Micikevicius et al. 2018, section 3.2).

    After `period` finite steps in a row the scale is multiplied by `factor`, unless that overflows float32. With
    `hysteresis=1` every non-finite step divides it by `factor`. With `hysteresis=n`, the first n - 1 non-finite steps
    after the scale last grew leave it unchanged, as in DeepSpeed. The scale never falls below `min_loss_scale`.

    `loss_scale`: float32 scalar. `counter`: finite steps since the last growth or non-finite step, int64 scalar.
    `left`: non-finite steps until the scale shrinks, int64 scalar.

    >>> scale = DynamicLossScale(1024.0, period=1)
    >>> scale.adjust(torch.tensor(True)).loss_scale, scale.adjust(torch.tensor(False)).loss_scale
    (tensor(2048.), tensor(512.))
    """

    loss_scale: Any = 2.0**16
    counter: Any = 0
    period: int = 2000
    factor: float = 2.0
    min_loss_scale: float = 1.0
    hysteresis: int = 1
    left: Any = None  # None: `hysteresis`

    def __post_init__(self) -> None:
        super().__post_init__()
        check_fields(self)
        for name, least in (("period", 1), ("hysteresis", 1), ("min_loss_scale", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"DynamicLossScale: {name} must be {least} or more, got {getattr(self, name)!r}.")
        if not self.factor > 1:
            raise ValueError(f"DynamicLossScale: factor must be above 1, got {self.factor!r}.")
        object.__setattr__(self, "counter", _scalar(self, "counter", self.counter, torch.int64))
        left = self.hysteresis if self.left is None else self.left
        object.__setattr__(self, "left", _scalar(self, "left", left, torch.int64))

    def adjust(self, finite: Tensor) -> DynamicLossScale:
        """Return the loss scale of the next step.

        `finite`: bool scalar tensor, whether this step's gradients are finite on all ranks.
        """
        grows = finite & (self.counter == self.period - 1)
        left = torch.where(finite, self.left, self.left - 1)
        shrinks = ~finite & (left <= 0)
        least = torch.full_like(self.loss_scale, self.min_loss_scale)
        smaller = torch.maximum(self.loss_scale / self.factor, least)
        larger = self.loss_scale * self.factor
        larger = torch.where(torch.isfinite(larger), larger, self.loss_scale)
        scale = torch.where(grows, larger, torch.where(shrinks, smaller, self.loss_scale))
        counter = torch.where(finite & ~grows, self.counter + 1, torch.zeros_like(self.counter))
        left = torch.where(grows, torch.full_like(left, self.hysteresis), torch.clamp_min(left, 1))
        return DynamicLossScale(scale, counter, self.period, self.factor, self.min_loss_scale, self.hysteresis, left)


def _scalar(owner: Any, name: str, x: Any, dtype: torch.dtype) -> Any:
    """Return a number as a tensor. What is none stays: trees are made of anything."""
    if not isinstance(x, int | float):
        return x
    if not 0 <= x < (math.inf if dtype.is_floating_point else 2.0**63):
        raise ValueError(f"{type(owner).__name__}: {name} must be 0 or more, got {x!r}.")
    return torch.tensor(x, dtype=dtype)


def check_loss_scale(loss_scale: Any, what: str) -> None:
    """Raise `TypeError` for anything but None or a loss scale, and for one of ours whose scale is not a number."""
    has_all = all(hasattr(loss_scale, x) for x in ("scale", "unscale", "adjust"))
    wrong = loss_scale.loss_scale if isinstance(loss_scale, StaticLossScale) else loss_scale
    if not (loss_scale is None or (has_all and (wrong is loss_scale or isinstance(wrong, Tensor)))):
        raise TypeError(
            f"{what} must be None or a loss scale such as zerofn.DynamicLossScale(2.0**16), got {told(wrong)}."
        )


tree.register_dataclass(NoLossScale)
tree.register_dataclass(StaticLossScale)
tree.register_dataclass(DynamicLossScale, static=("period", "factor", "min_loss_scale", "hysteresis"))
