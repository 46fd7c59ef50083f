"""The trust ratio of layer-wise adaptive methods: one number for each logical leaf, over all ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..sharded_math.reductions import norms
from ..util.arguments import known_arguments
from . import checks
from .base import About, EmptyState, GradientTransformation, no_state
from .leaf_runs import map_runs


@known_arguments
def scale_by_trust_ratio(
    min_norm: float = 0.0, trust_coefficient: float = 1.0, eps: float = 0.0
) -> GradientTransformation:
    """Multiply each leaf's update u by trust_coefficient * |p| / (|u| + eps) (You et al. 2020, Algorithm 2).

    Norms are of whole logical leaves over all ranks, and at least `min_norm`, as in optax. If |p| or |u| is zero,
    the update stays as it is. One small all-gather serves all leaves, and every stage has the same bits. Raises
    `ValueError` for a negative argument, and in `update` without the parameters.

    >>> tx = scale_by_trust_ratio()
    >>> params, grads = {"w": torch.ones(2)}, {"w": torch.tensor([3.0, 4.0])}
    >>> tx.update(grads, tx.init(params), params)[0]
    {'w': tensor([0.8485, 1.1314])}
    """
    checks.number("scale_by_trust_ratio", 0.0, min_norm=min_norm, trust_coefficient=trust_coefficient, eps=eps)

    def update(updates: Any, state: EmptyState, params: Any = None) -> tuple[Any, EmptyState]:
        checks.needs_params("scale_by_trust_ratio", params)
        names, both = norms((params, updates))
        half = len(names) // 2
        p, u = both[:half].clamp(min=min_norm), both[half:].clamp(min=min_norm)
        ratios = torch.where((p == 0) | (u == 0), 1.0, trust_coefficient * p / (u + eps))
        return scale_leaves(updates, {name: k for k, name in enumerate(names[:half])}, ratios), state

    return GradientTransformation(no_state, update, About("scale_by_trust_ratio", (min_norm, trust_coefficient, eps)))


def scale_leaves(values: Any, columns: dict[str, int], factors: Tensor) -> Any:
    """Multiply every logical leaf of a tree, `Sharded` or plain, by its own entry of `factors` [leaves].

    `columns`: leaf name -> index of its entry, with names as `norms` returns them.
    """

    def rule(tensors: list[Tensor], _: int, starts: list[int], stops: list[int], found: list[int]) -> tuple[Tensor]:
        return (torch.ops.zerofn.scale_runs(*tensors, starts, stops, found, factors),)

    def column(leaf: Any) -> int:
        return columns[f"0.{leaf.name}" if leaf.name else "0"]

    scaled = map_runs(rule, column, values)
    return scaled[0] if scaled else values
