"""Clip or scale each leaf by a root mean square over all of its elements."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..sharded_math.axis_reductions import logical_leaves
from ..sharded_math.reductions import norms
from ..util.arguments import known_arguments
from . import checks
from .base import About, EmptyState, GradientTransformation, no_state
from .trust_ratio import scale_leaves


@known_arguments
def clip_by_block_rms(threshold: float) -> GradientTransformation:
    """Divide each leaf by max(1, rms / threshold), where rms is the root mean square of the leaf over all ranks.

    This is the update clipping of Adafactor (Shazeer and Stern 2018, Algorithm 4). One small all-gather serves all
    leaves. Raises `ValueError` unless `threshold` is positive.

    >>> tx, grads = clip_by_block_rms(0.5), {"w": torch.tensor([3.0, 4.0])}
    >>> tx.update(grads, tx.init(grads))[0]
    {'w': tensor([0.4243, 0.5657])}
    """
    checks.number("clip_by_block_rms", 0.0, above=True, threshold=threshold)

    def update(updates: Any, state: EmptyState, params: Any = None) -> tuple[Any, EmptyState]:
        names, rms = _rms(updates)
        return scale_leaves(updates, names, 1 / (rms / threshold).clamp(min=1.0)), state

    return GradientTransformation(no_state, update, About("clip_by_block_rms", (threshold,)))


@known_arguments
def scale_by_param_block_rms(min_scale: float = 1e-3) -> GradientTransformation:
    """Multiply each leaf's update by max(min_scale, rms), where rms is its parameter's root mean square over all
    ranks.

    This is the relative step size of Adafactor (Shazeer and Stern 2018, Algorithm 4). One small all-gather serves
    all leaves. Raises `ValueError` for a negative `min_scale`, and in `update` without the parameters.

    >>> tx = scale_by_param_block_rms()
    >>> params, grads = {"w": torch.ones(2)}, {"w": torch.tensor([3.0, 4.0])}
    >>> tx.update(grads, tx.init(params), params)[0]
    {'w': tensor([3., 4.])}
    """
    checks.number("scale_by_param_block_rms", 0.0, min_scale=min_scale)

    def update(updates: Any, state: EmptyState, params: Any = None) -> tuple[Any, EmptyState]:
        checks.needs_params("scale_by_param_block_rms", params)
        names, rms = _rms(params)
        return scale_leaves(updates, names, rms.clamp(min=min_scale)), state

    return GradientTransformation(no_state, update, About("scale_by_param_block_rms", (min_scale,)))


def _rms(values: Any) -> tuple[dict[str, int], Tensor]:
    """Return the index of each leaf by its name, as `scale_leaves` takes it, and the root mean squares [leaves]."""
    names, found = norms((values,))
    sizes = [max(1, leaf.numel()) for leaf in logical_leaves(values)]
    roots = torch.tensor(sizes, dtype=found.dtype, device=found.device).sqrt()
    return {name: k for k, name in enumerate(names)}, found / roots
