"""Muon for matrices, Adam for all other leaves."""

from __future__ import annotations

from collections.abc import Sequence

from ..util.arguments import checked
from . import checks
from .base import GradientTransformation, LeafInfo, Mask, ScalarOrSchedule, named
from .chain import chain
from .decay import add_decayed_weights
from .multi_transform import multi_transform
from .scale import scale_by_learning_rate
from .scale_by_adam import check_moments, scale_by_adam
from .scale_by_muon import QUINTIC, Coefficients, hashable, scale_by_muon, scale_by_shape
from .torch_optimizers import told


def _is_matrix(leaf: LeafInfo) -> bool:
    return leaf.ndim == 2


@told
@checked()
def muon(
    learning_rate: ScalarOrSchedule,
    ns_coeffs: Coefficients | Sequence[Coefficients] = QUINTIC,
    ns_steps: int = 5,
    beta: float = 0.95,
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    weight_decay_mask: Mask | None = None,
    *,
    nesterov: bool = True,
    adaptive: bool = False,
    adam_b1: float = 0.9,
    adam_b2: float = 0.999,
    adam_eps_root: float = 0.0,
    adam_weight_decay: float = 0.0,
    adam_learning_rate: ScalarOrSchedule | None = None,
    matrices: Mask = _is_matrix,
    consistent_rms: float | None = None,
) -> GradientTransformation:
    """Muon (Jordan 2024), with the arguments of optax.contrib.muon except for `matrices`.

    A `multi_transform` with two labels. Leaves "muon" go through `scale_by_muon`, `scale_by_shape`,
    `add_decayed_weights` and `scale_by_learning_rate`. Leaves "adam" go through AdamW, or NAdamW with `nesterov`,
    at `adam_learning_rate` (by default `learning_rate`).

    `matrices(leaf) -> bool`: which leaves are "muon"; by default those with two dims. Embeddings and the last layer
    do better with Adam: `lambda leaf: leaf.ndim == 2 and "embed" not in leaf.name`. `consistent_rms`: see
    `scale_by_shape`.

    On shards, every unit's momentum is gathered once a step, see `scale_by_muon`. A unit with leaves of both labels
    stores the moments of both for all its elements: one of Muon and two of Adam. So give matrices units of their own,
    by `shard(unit=...)`: these store one moment. Raises `ValueError` for hyperparameters out of range.

    >>> import torch
    >>> tx = muon(0.02, matrices=lambda leaf: leaf.ndim == 2 and "embed" not in leaf.name)
    >>> sorted(tx.init({"embed": torch.zeros(4, 2), "w": torch.zeros(2, 2)}).inner_states)
    ['adam', 'muon']
    """
    adam_rate = learning_rate if adam_learning_rate is None else adam_learning_rate
    checks.learning_rate("muon", learning_rate)
    checks.learning_rate("muon: adam", adam_rate)
    checks.leaf_function("muon", "matrices", matrices)
    checks.mask("muon", weight_decay_mask)
    checks.number("muon", 0.0, weight_decay=weight_decay, adam_weight_decay=adam_weight_decay)
    checks.number("muon", 0.0, adam_eps_root=adam_eps_root)
    check_moments("muon: adam", adam_b1, adam_b2, eps)
    parts = chain(
        scale_by_muon(ns_coeffs, ns_steps, beta, eps, nesterov=nesterov, adaptive=adaptive),
        scale_by_shape(consistent_rms),
        add_decayed_weights(weight_decay, weight_decay_mask),
        scale_by_learning_rate(learning_rate),
    )
    scaled = scale_by_adam(adam_b1, adam_b2, eps, adam_eps_root, nesterov=nesterov)
    adam = chain(scaled, add_decayed_weights(adam_weight_decay), scale_by_learning_rate(adam_rate))
    both = multi_transform({"muon": parts, "adam": adam}, lambda leaf: "muon" if matrices(leaf) else "adam")
    args = (learning_rate, hashable(ns_coeffs), ns_steps, beta, eps, weight_decay, weight_decay_mask, nesterov)
    more = (adaptive, adam_b1, adam_b2, adam_eps_root, adam_weight_decay, adam_learning_rate, matrices, consistent_rms)
    return named(both, "muon", *args, *more)
