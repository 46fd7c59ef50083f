"""LAMB: Adam with a trust ratio for each layer."""

from __future__ import annotations

from . import checks
from .base import GradientTransformation, Mask, ScalarOrSchedule, named
from .chain import chain
from .decay import add_decayed_weights
from .scale import scale_by_learning_rate
from .scale_by_adam import check_moments, scale_by_adam
from .torch_optimizers import told
from .trust_ratio import scale_by_trust_ratio


@told
def lamb(
    learning_rate: ScalarOrSchedule,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-6,
    eps_root: float = 0.0,
    weight_decay: float = 0.0,
    mask: Mask | None = None,
) -> GradientTransformation:
    """LAMB (You et al. 2020, Algorithm 2), with optax's arguments.

    A chain of `scale_by_adam`, `add_decayed_weights`, `scale_by_trust_ratio` and `scale_by_learning_rate`.
    `mask(leaf) -> bool`: whether a leaf decays; by default all do. Raises `ValueError` for hyperparameters out of
    range.

    >>> import torch
    >>> tx = lamb(0.1)
    >>> params, grads = {"w": torch.ones(2)}, {"w": torch.tensor([3.0, 4.0])}
    >>> tx.update(grads, tx.init(params), params)[0]
    {'w': tensor([-0.1000, -0.1000])}
    """
    checks.learning_rate("lamb", learning_rate)
    checks.number("lamb", 0.0, eps_root=eps_root, weight_decay=weight_decay)
    checks.mask("lamb", mask)
    check_moments("lamb", b1, b2, eps)
    parts = chain(
        scale_by_adam(b1, b2, eps, eps_root),
        add_decayed_weights(weight_decay, mask),
        scale_by_trust_ratio(),
        scale_by_learning_rate(learning_rate),
    )
    return named(parts, "lamb", learning_rate, b1, b2, eps, eps_root, weight_decay, mask)
