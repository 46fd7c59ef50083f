"""Adam and AdamW, with one fused pass over each unit."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from .. import tree
from ..ops import adamw as _op  # noqa: F401  (defines zerofn::adamw)
from . import checks
from . import moment_formats as formats
from .base import GradientTransformation, Mask, ScalarOrSchedule, rate_at
from .fused import LeafConstants, LeafScale, fused_rule
from .moment_formats import MomentWord
from .scale_by_adam import AdamState, check_moments, direction, init_moments
from .torch_optimizers import told


@told
def adamw(
    learning_rate: ScalarOrSchedule,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 1e-4,
    mask: Mask | None = None,
    lr_scale: LeafScale | None = None,
    moments: MomentWord | None = None,
) -> GradientTransformation:
    """AdamW (Loshchilov and Hutter 2019, Algorithm 2), in the arithmetic of `torch.optim.AdamW(fused=True)`.

    m = b1 * m + (1 - b1) * g; v = b2 * v + (1 - b2) * g^2; p -= learning_rate * (m' / (sqrt(v') + eps) +
    weight_decay * p), where m' = m / (1 - b1^t) and v' = v / (1 - b2^t) in the t-th applied update. m and v start
    at zero.

    `mask(leaf) -> bool`: whether a leaf decays; by default all do. `lr_scale(leaf) -> float`: a factor of the
    leaf's learning rate. `moments`: the format of m and v. None is the parameters' dtype: 8 bytes a parameter for
    both, if that is float32. "bf16" takes 4 bytes. "8bit" and "fp8" (e4m3 for m, e5m2 for v) have one scale per 256
    elements, take 2.03 bytes and need a float32 master; "fp8" has no kernel, so torch's operations update it, more
    slowly. Raises `ValueError` for hyperparameters out of range.

    >>> tx = adamw(0.1)
    >>> params, grads = {"w": torch.ones(2)}, {"w": torch.tensor([3.0, 4.0])}
    >>> tx.update(grads, tx.init(params), params)[0]
    {'w': tensor([-0.1000, -0.1000])}
    """
    return _adam("adamw", learning_rate, b1, b2, eps, weight_decay, mask, lr_scale, moments)


@told
def adam(
    learning_rate: ScalarOrSchedule,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    lr_scale: LeafScale | None = None,
    moments: MomentWord | None = None,
) -> GradientTransformation:
    """Adam (Kingma and Ba 2015, Algorithm 1), in the arithmetic of `torch.optim.Adam(fused=True)`.

    It is `adamw` without weight decay. Raises `ValueError` for hyperparameters out of range.

    >>> tx = adam(0.1)
    >>> params, grads = {"w": torch.ones(2)}, {"w": torch.tensor([3.0, 4.0])}
    >>> tx.update(grads, tx.init(params), params)[0]
    {'w': tensor([-0.1000, -0.1000])}
    """
    return _adam("adam", learning_rate, b1, b2, eps, 0.0, None, lr_scale, moments)


def _adam(
    name: str,
    learning_rate: ScalarOrSchedule,
    b1: float,
    b2: float,
    eps: float,
    weight_decay: float,
    mask: Mask | None,
    lr_scale: LeafScale | None,
    moments: str | None,
) -> GradientTransformation:
    check_adamw(name, learning_rate, b1, b2, eps, weight_decay, mask, lr_scale)
    formats.check(name, moments)

    constants = LeafConstants(weight_decay, mask, lr_scale)

    def update(grads: Any, state: AdamState, params: Any) -> tuple[Any, AdamState]:
        rate = rate_at(learning_rate, state.count)
        directions, state = direction(grads, state, b1, b2, eps)

        def decayed(d: Tensor, p: Tensor, decay: Any, scale: Any) -> Tensor:
            return (-rate * scale * (d + decay * p)).to(p.dtype)

        return tree.tree_map(decayed, directions, params, *constants.over(params)), state

    def call(tensors: list[Tensor], runs: tuple[Any, ...], offset: int) -> Any:
        return torch.ops.zerofn.adamw(*tensors, *runs, b1, b2, eps, name == "adamw", moments, offset)

    decays = (weight_decay, mask) if name == "adamw" else ()
    args = (learning_rate, b1, b2, eps, *decays, lr_scale, moments)
    init = partial(init_moments, moments=moments)
    return fused_rule(name, args, init, update, call, ("mu", "nu"), learning_rate, constants)


def check_adamw(
    name: str,
    learning_rate: ScalarOrSchedule,
    b1: float,
    b2: float,
    eps: float,
    weight_decay: float,
    mask: Mask | None,
    lr_scale: LeafScale | None,
) -> None:
    """Raise `TypeError` or `ValueError` for hyperparameters of `name` that are out of range."""
    checks.learning_rate(name, learning_rate)
    checks.number(name, 0.0, weight_decay=weight_decay)
    checks.leaf_constants(name, mask, lr_scale)
    check_moments(name, b1, b2, eps)
