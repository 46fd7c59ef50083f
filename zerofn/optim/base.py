"""optax's contract: a gradient transformation is a pair of pure functions."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from .. import tree
from ..sharding.layout import LeafInfo as LeafInfo

ScalarOrSchedule = float | Callable[[Tensor], Any]


Mask = Callable[[LeafInfo], bool]


class Apply(Protocol):
    """Clip, unscale, skip and update at once: `(grads, state, params, factor, finite) -> (params, state)`.

    `factor`: None, or a float scalar tensor that multiplies every gradient. `finite`: None, or a bool scalar
    tensor; False leaves parameters and state unchanged, bit for bit.
    """

    def __call__(
        self, grads: Any, state: Any, params: Any, factor: Tensor | None, finite: Tensor | None
    ) -> tuple[Any, Any]:
        """One step."""


@dataclass(frozen=True)
class GradientTransformation:
    """optax's pair: `init(params) -> state` and `update(grads, state, params) -> (updates, state)`.

    Updates are added to the parameters (`apply_updates`). Two are equal if name and arguments are; without a name,
    if their functions are. Optional: `apply` (see `Apply`); `factor` (`(grads, factor so far) -> factor`, for
    transformations that multiply by one scalar); `label` (a hashable per leaf; leaves with equal labels are
    neighbours in a unit); `learning_rate(state)`; `by_runs` (`apply` does not touch what is between a shard's
    leaves).
    """

    init: Callable[[Any], Any] = field(compare=False)
    update: Callable[..., tuple[Any, Any]] = field(compare=False)
    name: str = ""
    args: tuple[Any, ...] = ()
    apply: Apply | None = field(default=None, compare=False)
    factor: Callable[[Any, Tensor | None], Tensor | None] | None = field(default=None, compare=False)
    label: Callable[[LeafInfo], Hashable] | None = field(default=None, compare=False)
    learning_rate: Callable[[Any], Any] | None = field(default=None, compare=False)
    by_runs: bool = field(default=False, compare=False)

    def __post_init__(self) -> None:
        if not self.name:
            object.__setattr__(self, "args", (self.init, self.update))

    def __repr__(self) -> str:
        return f"{self.name}({', '.join(map(shown, self.args))})" if self.name else "GradientTransformation(...)"


def masks(tx: GradientTransformation) -> Iterator[tuple[str, Mask]]:
    """Return (its name, mask) of a transformation with a mask, and of those inside it."""
    made_by = getattr(sys.modules[__package__], tx.name, None)
    names = inspect.signature(made_by).parameters if inspect.isfunction(made_by) else ()
    yield from ((tx.name, x) for name, x in zip(names, tx.args, strict=False) if name.endswith("mask") and callable(x))
    todo = list(tx.args)
    while todo:
        x = todo.pop(0)
        if isinstance(x, GradientTransformation):
            yield from masks(x)
        elif isinstance(x, tuple | list):
            todo += x


def shown(x: Any) -> str:
    """Return a hyperparameter as a person would write it; functions by name."""
    return x.__qualname__.rpartition("<locals>.")[2] if inspect.isroutine(x) else repr(x)


class EmptyState(NamedTuple):
    """The state of a transformation that has none."""


def no_state(params: Any) -> EmptyState:
    """The `init` of a transformation that has no state."""
    return EmptyState()


def apply_updates(params: Any, updates: Any) -> Any:
    """`params + updates`, leaf by leaf, in the parameters' dtypes."""
    return tree.tree_map(lambda p, u: (p + u).to(p.dtype), params, updates)


def step(
    tx: GradientTransformation,
    grads: Any,
    state: Any,
    params: Any,
    factor: Tensor | None = None,
    finite: Tensor | None = None,
) -> tuple[Any, Any]:
    """Run one step with the semantics of `Apply`: by the transformation's own `apply`, or by `update`, `apply_updates`
    and a where.
    """
    if tx.apply is not None:
        return tx.apply(grads, state, params, factor, finite)
    if factor is not None:
        grads = tree.tree_map(lambda g: g * factor.to(g.dtype), grads)
    updates, fresh = tx.update(grads, state, params)
    moved = apply_updates(params, updates)
    if finite is None:
        return moved, fresh

    def keep(new: Any, old: Any) -> Any:
        return torch.where(finite, new, old) if isinstance(new, Tensor) else new

    return tree.tree_map(keep, moved, params), tree.tree_map(keep, fresh, state)


def rate_at(learning_rate: ScalarOrSchedule, count: Tensor) -> float | Tensor:
    """Return the learning rate after `count` applied updates: a float, or a schedule's float64 scalar tensor."""
    return learning_rate(count) if callable(learning_rate) else learning_rate


def count_zero(params: Any) -> Tensor:
    """Return a counter of applied updates: int64 scalar, on the parameters' device."""
    device = next((p.device for p in tree.leaves(params)), None)
    return torch.zeros((), dtype=torch.int64, device=device)
