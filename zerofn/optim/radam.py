"""RAdam: Adam that divides by its second moment only after enough updates."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import tree
from ..util.arguments import checked
from . import checks
from .base import About, GradientTransformation, ScalarOrSchedule, named
from .chain import chain
from .scale import scale_by_learning_rate
from .scale_by_adam import AdamState, check_moments, first_moments, init_moments, next_moments
from .torch_optimizers import told


@checked("nesterov")
def scale_by_radam(
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    eps_root: float = 0.0,
    threshold: float = 5.0,
    *,
    nesterov: bool = False,
) -> GradientTransformation:
    """Scale by rectified Adam's direction (Liu et al. 2020, Algorithm 2).

    After t updates the second moment averages about r = R - 2 t b2^t / (1 - b2^t) gradients, where R = 2 / (1 - b2)
    - 1. While r is less than `threshold`, the direction is the bias-corrected first moment. From then on it is Adam's
    direction times the rectification sqrt((r - 4) (r - 2) R / ((R - 4) (R - 2) r)). With `nesterov`, the first
    moment is that of `scale_by_adam(nesterov=True)`. The state is an `AdamState`. Raises `ValueError` for
    hyperparameters out of range.

    >>> tx, grads = scale_by_radam(), {"w": torch.tensor([3.0, 4.0])}
    >>> tx.update(grads, tx.init(grads))[0]
    {'w': tensor([3., 4.])}
    """
    hyper = (b1, b2, eps, eps_root, threshold)
    _check("scale_by_radam", *hyper)
    longest = 2 / (1 - b2) - 1

    def update(grads: Any, state: AdamState, params: Any = None) -> tuple[Any, AdamState]:
        state = next_moments(grads, state, b1, b2)
        count = state.count.double()
        faded = b2**count
        length = longest - 2 * count * faded / (1 - faded)
        grown = length.clamp(min=4.0)  # below 4 the root would be NaN; the factor is then not used
        factor = ((grown - 4) * (grown - 2) * longest / ((longest - 4) * (longest - 2) * grown)).sqrt()

        def one(m: Tensor, v: Tensor) -> Tensor:
            adams = factor.to(m.dtype) * m / ((v / (1 - faded).to(v.dtype) + eps_root).sqrt() + eps)
            return torch.where(length >= threshold, adams, m)

        return tree.tree_map(one, first_moments(grads, state, b1, nesterov), state.nu), state

    return GradientTransformation(init_moments, update, About("scale_by_radam", (*hyper, nesterov)))


@told
@checked("nesterov")
def radam(
    learning_rate: ScalarOrSchedule,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    eps_root: float = 0.0,
    threshold: float = 5.0,
    *,
    nesterov: bool = False,
) -> GradientTransformation:
    """Rectified Adam (Liu et al. 2020): a chain of `scale_by_radam` and `scale_by_learning_rate`.

    Raises `ValueError` for hyperparameters out of range.

    >>> tx = radam(0.1)
    >>> params, grads = {"w": torch.ones(2)}, {"w": torch.tensor([3.0, 4.0])}
    >>> tx.update(grads, tx.init(params), params)[0]
    {'w': tensor([-0.3000, -0.4000])}
    """
    checks.learning_rate("radam", learning_rate)
    hyper = (b1, b2, eps, eps_root, threshold)
    _check("radam", *hyper)
    scaled = scale_by_radam(*hyper, nesterov=nesterov)
    return named(chain(scaled, scale_by_learning_rate(learning_rate)), "radam", learning_rate, *hyper, nesterov)


def _check(where: str, b1: float, b2: float, eps: float, eps_root: float, threshold: float) -> None:
    check_moments(where, b1, b2, eps)
    checks.number(where, 0.0, eps_root=eps_root)
    checks.number(where, 4.0, threshold=threshold)  # the rectification has the root of length - 4
    if not b2 > 0.6:
        raise ValueError(
            f"{where}: b2 must be more than 0.6, got {b2!r}: at 0.6 or less the length of the average never exceeds 4 "
            "updates, which rectification needs."
        )
