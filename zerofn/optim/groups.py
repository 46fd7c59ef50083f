"""Several transformations on one tree, each on its own leaves: shared by `masked` and `multi_transform`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor

from .base import GradientTransformation, Mask, step
from .select import merge, select


class MaskedTransformation(NamedTuple):
    """A transformation, and the mask of the leaves that it updates."""

    tx: GradientTransformation
    keep: Mask


def init_groups(groups: Sequence[MaskedTransformation], params: Any) -> list[Any]:
    """Return a state for each group."""
    return [tx.init(select(params, keep)) for tx, keep in groups]


def update_groups(
    groups: Sequence[MaskedTransformation], grads: Any, states: Sequence[Any], params: Any
) -> tuple[Any, list[Any]]:
    """Return the updates of all leaves, each from its own group, and the groups' next states."""
    out, fresh = grads, []
    for (tx, keep), state in zip(groups, states, strict=True):
        updates, state = tx.update(select(grads, keep), state, select(params, keep))
        out = merge(out, updates, keep)
        fresh.append(state)
    return out, fresh


def apply_groups(
    groups: Sequence[MaskedTransformation],
    grads: Any,
    states: Sequence[Any],
    params: Any,
    factor: Tensor | None,
    finite: Tensor | None,
) -> tuple[Any, list[Any]]:
    """Run a step of each group on its own leaves, with the semantics of `Apply`."""
    fresh = []
    for (tx, keep), state in zip(groups, states, strict=True):
        part, state = step(tx, select(grads, keep), state, select(params, keep), factor, finite)
        params = merge(params, part, keep, by_runs=tx.fused is not None and tx.fused.by_runs)
        fresh.append(state)
    return params, fresh
