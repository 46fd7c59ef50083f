"""Adam and AdamW, one fused pass a unit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import tree
from ..ops import adamw as _op  # noqa: F401  (defines zerofn::adamw)
from .base import GradientTransformation, LeafInfo, ScalarOrSchedule, count_zero, rate_at
from .runs import slots, spread


class AdamState(NamedTuple):
    """`count`: applied updates, int64 scalar; `mu`, `nu`: moments in the structure and dtype of the parameters."""

    count: Tensor
    mu: Any
    nu: Any


Mask = Callable[[LeafInfo], bool]


def adamw(learning_rate: ScalarOrSchedule, b1: float = 0.9, b2: float = 0.999, eps: float = 1e-8,
          weight_decay: float = 1e-4, mask: Mask | None = None) -> GradientTransformation:
    """AdamW (Loshchilov and Hutter 2019, Algorithm 2), in the arithmetic of `torch.optim.AdamW(fused=True)`.

    `mask(leaf) -> bool` says which leaves decay; all do without one. Moments are zero at first, in the
    parameters' dtype. Raises `ValueError` for hyperparameters out of range.
    """
    return _adam("adamw", learning_rate, b1, b2, eps, weight_decay, mask, True)


def adam(learning_rate: ScalarOrSchedule, b1: float = 0.9, b2: float = 0.999, eps: float = 1e-8
         ) -> GradientTransformation:
    """Adam (Kingma and Ba 2015, Algorithm 1), in the arithmetic of `torch.optim.Adam(fused=True)`."""
    return _adam("adam", learning_rate, b1, b2, eps, 0.0, None, False)


def _adam(name: str, learning_rate: ScalarOrSchedule, b1: float, b2: float, eps: float, weight_decay: float,
          mask: Mask | None, decoupled: bool) -> GradientTransformation:
    _check(name, b1=b1, b2=b2, eps=eps, weight_decay=weight_decay)

    def decay_of(leaf: LeafInfo) -> float:
        return weight_decay if mask is None or mask(leaf) else 0.0

    def init(params: Any) -> AdamState:
        zeros = [tree.tree_map(torch.zeros_like, params) for _ in range(2)]
        return AdamState(count_zero(), *zeros)

    def update(grads: Any, state: AdamState, params: Any) -> tuple[Any, AdamState]:
        count = state.count + 1
        rate = rate_at(learning_rate, state.count)
        mu = tree.tree_map(lambda m, g: m + (1 - b1) * (g - m), state.mu, grads)
        nu = tree.tree_map(lambda v, g: b2 * v + (1 - b2) * g * g, state.nu, grads)
        c1, c2 = 1 - b1 ** count.double(), (1 - b2 ** count.double()).sqrt()

        def step(p: Tensor, m: Tensor, v: Tensor, decay: Any) -> Tensor:
            direction = (m / c1.to(m.dtype)) / (v.sqrt() / c2.to(v.dtype) + eps)
            return (-rate * (direction + decay * p)).to(p.dtype)

        decays = tree.leaves(spread(params, decay_of))
        leaves, treedef = tree.flatten(params)
        updates = [step(*each) for each in zip(leaves, tree.leaves(mu), tree.leaves(nu), decays, strict=True)]
        return tree.unflatten(treedef, updates), AdamState(count, mu, nu)

    def apply(grads: Any, state: AdamState, params: Any, factor: Tensor | None, finite: Tensor | None
              ) -> tuple[Any, AdamState]:
        rate = rate_at(learning_rate, state.count)
        lr, base = (rate, 1.0) if isinstance(rate, Tensor) else (None, rate)
        count = state.count + (1 if finite is None else finite)
        leaves, treedef = tree.flatten(params)
        flat = [leaves, tree.leaves(grads), tree.leaves(state.mu), tree.leaves(state.nu)]
        fresh = []
        for slot in slots(params, decay_of):
            starts, stops, decays = _columns(slot.runs)
            fresh.append(torch.ops.zerofn.adamw(*(f[slot.index] for f in flat), count, lr, factor, finite, starts,
                                                stops, [base] * len(starts), decays, b1, b2, eps, decoupled))
        p, m, v = (tree.unflatten(treedef, column) for column in zip(*fresh, strict=True)) if fresh else (
            params, state.mu, state.nu)
        return p, AdamState(count, m, v)

    return GradientTransformation(
        init, update, name, (learning_rate, b1, b2, eps, weight_decay, mask), apply=apply,
        label=None if mask is None else decay_of,
        learning_rate=lambda state: rate_at(learning_rate, state.count),
    )


def _columns(runs: Sequence[tuple[int, int, float]]) -> tuple[list[int], list[int], list[float]]:
    return [a for a, _, _ in runs], [b for _, b, _ in runs], [c for _, _, c in runs]


def _check(name: str, *, b1: float, b2: float, eps: float, weight_decay: float) -> None:
    for key, value in (("b1", b1), ("b2", b2)):
        if not 0 <= value < 1:
            raise ValueError(f"{name}: {key} must lie in [0, 1), got {value!r}.")
    for key, value in (("eps", eps), ("weight_decay", weight_decay)):
        if not value >= 0:
            raise ValueError(f"{name}: {key} must not be negative, got {value!r}.")
