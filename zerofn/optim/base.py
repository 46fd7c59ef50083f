"""optax's contract: a gradient transformation is a pair of pure functions."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from .. import tree

Schedule = Callable[[Tensor], Tensor]
ScalarOrSchedule = float | Schedule


class LeafInfo(NamedTuple):
    """What masks and labels are asked about: a logical leaf, never a flat piece."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype


class Apply(Protocol):
    """Clip, unscale, skip and update in one pass: `(grads, state, params, factor, finite)` -> (params, state).

    `factor`: None or a float scalar tensor every gradient is multiplied by; `finite`: None or a bool scalar
    tensor, False leaves parameters and state as they were, bit for bit.
    """

    def __call__(self, grads: Any, state: Any, params: Any, factor: Tensor | None, finite: Tensor | None
                 ) -> tuple[Any, Any]:
        """One step."""


@dataclass(frozen=True)
class GradientTransformation:
    """`init(params) -> state`; `update(grads, state, params) -> (updates, state)`; updates are added to params.

    Two are equal when they have one name and equal arguments. Optional: `apply` (see `Apply`), `factor`
    (`(grads, factor so far) -> factor`, for transformations that only multiply by one scalar), `label` (a
    hashable per leaf; leaves with equal labels lie side by side in a unit), `learning_rate(state)`.
    """

    init: Callable[[Any], Any] = field(compare=False)
    update: Callable[..., tuple[Any, Any]] = field(compare=False)
    name: str = ""
    args: tuple[Any, ...] = ()
    apply: Apply | None = field(default=None, compare=False)
    factor: Callable[[Any, Tensor | None], Tensor] | None = field(default=None, compare=False)
    label: Callable[[LeafInfo], Hashable] | None = field(default=None, compare=False)
    learning_rate: Callable[[Any], Any] | None = field(default=None, compare=False)


class EmptyState(NamedTuple):
    """The state of a transformation that has none."""


def apply_updates(params: Any, updates: Any) -> Any:
    """`params + updates`, leaf by leaf, in the parameters' dtypes."""
    return tree.tree_map(lambda p, u: (p + u).to(p.dtype), params, updates)


def rate_at(learning_rate: ScalarOrSchedule, count: Tensor) -> float | Tensor:
    """The learning rate after `count` applied updates: a float, or a schedule's float64 scalar tensor."""
    return learning_rate(count) if callable(learning_rate) else learning_rate


def count_zero() -> Tensor:
    """A counter of applied updates: int64 scalar."""
    return torch.zeros((), dtype=torch.int64)
