"""AdamW with Nesterov momentum."""

from __future__ import annotations

from . import checks
from .base import GradientTransformation, Mask, ScalarOrSchedule, named
from .chain import chain
from .decay import add_decayed_weights
from .scale import scale_by_learning_rate
from .scale_by_adam import check_moments, scale_by_adam
from .torch_optimizers import told


@told
def nadamw(
    learning_rate: ScalarOrSchedule,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    eps_root: float = 0.0,
    weight_decay: float = 1e-4,
    mask: Mask | None = None,
) -> GradientTransformation:
    """NAdamW: Adam with Nesterov momentum (Dozat 2016) and decoupled weight decay.

    A chain of `scale_by_adam(nesterov=True)`, `add_decayed_weights` and `scale_by_learning_rate`. With
    `weight_decay=0.0` it is optax's `nadam`. `mask(leaf) -> bool`: whether a leaf decays; by default all do. Raises
    `ValueError` for hyperparameters out of range.

    >>> import torch
    >>> tx = nadamw(0.1)
    >>> params, grads = {"w": torch.ones(2)}, {"w": torch.tensor([3.0, 4.0])}
    >>> tx.update(grads, tx.init(params), params)[0]
    {'w': tensor([-0.1474, -0.1474])}
    """
    checks.learning_rate("nadamw", learning_rate)
    checks.number("nadamw", 0.0, eps_root=eps_root, weight_decay=weight_decay)
    checks.mask("nadamw", mask)
    check_moments("nadamw", b1, b2, eps)
    parts = chain(
        scale_by_adam(b1, b2, eps, eps_root, nesterov=True),
        add_decayed_weights(weight_decay, mask),
        scale_by_learning_rate(learning_rate),
    )
    return named(parts, "nadamw", learning_rate, b1, b2, eps, eps_root, weight_decay, mask)
