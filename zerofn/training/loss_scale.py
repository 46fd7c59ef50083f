"""Loss scales: frozen pytrees, after jmp. No method waits for the device.

float16 gradients below 6e-8 are rounded to zero. So the loss is multiplied by a scale before the backward pass, and
gradients are divided by it afterwards (Micikevicius et al. 2018, Mixed Precision Training, 3.2).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .. import tree


@dataclass(frozen=True)
class NoLossScale:
    """Scale nothing."""

    @property
    def loss_scale(self) -> float:
        """1."""
        return 1.0

    def scale(self, values: Any) -> Any:
        """Return `values` unchanged."""
        return values

    def unscale(self, values: Any) -> Any:
        """Return `values` unchanged."""
        return values

    def adjust(self, finite: Tensor) -> NoLossScale:
        """Return itself."""
        return self


@dataclass(frozen=True)
class StaticLossScale:
    """A constant scale. `loss_scale`: float32 scalar tensor, made from a float."""

    loss_scale: Any

    def __post_init__(self) -> None:
        object.__setattr__(self, "loss_scale", _scalar(self.loss_scale, torch.float32))

    def scale(self, values: Any) -> Any:
        """Multiply every leaf by the scale."""
        return tree.tree_map(lambda x: x * self.loss_scale.to(x.dtype), values)

    def unscale(self, values: Any) -> Any:
        """Multiply every leaf by one over the scale. float16 leaves become float32, because unscaled they may not
        fit.
        """
        inverse = 1.0 / self.loss_scale

        def unscaled(x: Tensor) -> Tensor:
            x = x.float() if x.dtype == torch.float16 else x
            return x * inverse.to(x.dtype)

        return tree.tree_map(unscaled, values)

    def adjust(self, finite: Tensor) -> Any:
        """Return itself."""
        return self


@dataclass(frozen=True)
class DynamicLossScale(StaticLossScale):
    """A scale that grows by `factor` after `period` finite steps, and shrinks by it after a non-finite one.

    `hysteresis`: the number of non-finite steps before it shrinks; after that, each further one shrinks it. 1
    tolerates none. `left` counts down, and is restored when the scale grows (as in DeepSpeed). The scale never goes
    below `min_loss_scale`. `counter`: finite steps since the last change.
    """

    loss_scale: Any = 2.0**16
    counter: Any = 0
    period: int = 2000
    factor: float = 2.0
    min_loss_scale: float = 1.0
    hysteresis: int = 1
    left: Any = None  # non-finite steps until it shrinks

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "counter", _scalar(self.counter, torch.int64))
        object.__setattr__(self, "left", _scalar(self.hysteresis if self.left is None else self.left, torch.int64))

    def adjust(self, finite: Tensor) -> DynamicLossScale:
        """Return the scale for the next step. `finite`: bool scalar, whether all gradients of this step were finite."""
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


def _scalar(x: Any, dtype: torch.dtype) -> Any:
    return torch.tensor(x, dtype=dtype) if isinstance(x, int | float) else x


tree.register_dataclass(NoLossScale)
tree.register_dataclass(StaticLossScale)
tree.register_dataclass(DynamicLossScale, static=("period", "factor", "min_loss_scale", "hysteresis"))
