"""Apply another transformation to each group of leaves."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from typing import Any, NamedTuple

from torch import Tensor

from ..util.arguments import known_arguments
from . import checks
from .base import About, Fused, GradientTransformation, LeafInfo, Mask
from .groups import MaskedTransformation, apply_groups, init_groups, update_groups


class MultiTransformState(NamedTuple):
    """The state of `multi_transform`.

    `inner_states`: label -> the state of its transformation, for its leaves only.

    >>> import torch
    >>> from zerofn import optim
    >>> parts = {"fast": optim.sgd(1.0), "slow": optim.sgd(0.1)}
    >>> tx = multi_transform(parts, lambda leaf: "slow" if leaf.name == "w" else "fast")
    >>> tx.init({"w": torch.zeros(2), "b": torch.zeros(2)}).inner_states["slow"]
    SgdState(count=tensor(0), trace=None)
    """

    inner_states: dict[Hashable, Any]


@known_arguments
def multi_transform(
    transforms: Mapping[Hashable, GradientTransformation], labels: Callable[[LeafInfo], Hashable]
) -> GradientTransformation:
    """Apply `transforms[labels(leaf)]` to each leaf (optax.multi_transform).

        multi_transform({"body": adamw(3e-4), "head": lion(3e-5), "fixed": set_to_zero()},
                        lambda leaf: "head" if leaf.name.startswith("head.") else "body")

    If only learning rates differ, use `lr_scale` of one optimizer: it needs one pass, and no unit has moments
    twice. Norms inside a transformation are over its own leaves. Fused rules stay fused. On `Sharded` trees, a unit
    with leaves of two labels has the moments of both for all its leaves. Raises `TypeError` for an argument of the
    wrong type, `ValueError` for a label without a transformation.

    >>> import torch, zerofn.optim as optim
    >>> tx = multi_transform({"a": optim.scale(2), "b": optim.scale(3)}, lambda x: x.name)
    >>> tx.update(grads := {"a": torch.ones(1), "b": torch.ones(1)}, tx.init(grads))[0]
    {'a': tensor([2.]), 'b': tensor([3.])}
    """
    checks.leaf_function("multi_transform", "labels", labels, "label")
    if not isinstance(transforms, Mapping) or not transforms:
        raise TypeError(
            "multi_transform: transforms must be a dict, label -> transformation, such as "
            f"{{'body': optim.adamw(3e-4), 'head': optim.adamw(3e-3)}}; got {transforms!r}."
        )
    for key, tx in transforms.items():
        checks.transformation(f"multi_transform: label {key!r}", tx)
    transforms = dict(transforms)
    groups = [MaskedTransformation(tx, _keeper(transforms, labels, key)) for key, tx in transforms.items()]
    rates = {key: tx.about.learning_rate for key, tx in transforms.items() if tx.about.learning_rate}

    def state_of(states: list[Any]) -> MultiTransformState:
        return MultiTransformState(dict(zip(transforms, states, strict=True)))

    def states_of(state: MultiTransformState) -> list[Any]:
        return [state.inner_states[key] for key in transforms]

    def init(params: Any) -> MultiTransformState:
        return state_of(init_groups(groups, params))

    def update(grads: Any, state: MultiTransformState, params: Any = None) -> tuple[Any, MultiTransformState]:
        updates, fresh = update_groups(groups, grads, states_of(state), params)
        return updates, state_of(fresh)

    def apply(
        grads: Any, state: MultiTransformState, params: Any, factor: Tensor | None, finite: Tensor | None
    ) -> tuple[Any, MultiTransformState]:
        params, fresh = apply_groups(groups, grads, states_of(state), params, factor, finite)
        return params, state_of(fresh)

    def label(leaf: LeafInfo) -> Hashable:
        tx = transforms.get(labels(leaf))  # None: a frozen leaf may have any label
        return labels(leaf), tx.about.label(leaf) if tx and tx.about.label else ()

    def learning_rates(state: MultiTransformState) -> dict[Hashable, Any]:
        return {key: rate(state.inner_states[key]) for key, rate in rates.items()}

    args = (tuple(transforms.items()), labels)
    about = About("multi_transform", args, label, learning_rates if rates else None)
    masks = tuple(mask for tx in transforms.values() for mask in tx.masks)
    return GradientTransformation(init, update, about, masks, Fused(apply, by_runs=True))


def _keeper(transforms: Mapping[Hashable, Any], labels: Callable[[LeafInfo], Hashable], key: Hashable) -> Mask:
    def keep(leaf: LeafInfo) -> bool:
        label = labels(leaf)
        if label not in transforms:
            raise ValueError(
                f"multi_transform: leaf {leaf.name!r} has label {label!r}, but transforms has no entry for it. Add a "
                f"transformation for this label, or return one of {list(transforms)}."
            )
        return label == key

    return keep
