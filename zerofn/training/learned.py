"""Which parameters of a state learn: what the optimizer sees of a tree, and how a tree is put together again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .. import tree
from ..sharding.sharded import is_sharded, trainable, with_trainable


@dataclass(frozen=True)
class _Frozen:
    """The predicate of frozen leaves: some names, and what a predicate of the user selects."""

    names: frozenset[str]
    also: Callable[[str], bool] | None

    def __call__(self, name: str) -> bool:
        return name in self.names or (self.also is not None and self.also(name))


def with_unlearned(params: Any, frozen: Callable[[str], bool] | None) -> Callable[[str], bool] | None:
    """Return the predicate of what is frozen, with what is so already."""
    paths, nodes, _ = tree.flatten_with_path(params, is_leaf=is_sharded)
    names = set[str]()
    for path, x in zip(paths, nodes, strict=True):
        if is_sharded(x):  # laid out with frozen units
            units = [unit for unit in x.layout.units if not unit.trainable]
            names.update(tree.name_of((*path, leaf.name)) for unit in units for leaf in unit.leaves)
        elif isinstance(x, torch.nn.Parameter) and not x.requires_grad:
            names.add(tree.name_of(path))
    return _Frozen(frozenset(names), frozen) if names else frozen


def learning(params: Any, frozen: Callable[[str], bool] | None) -> Any:
    """Return the part of a tree that the optimizer sees.

    A `Sharded` comes without frozen units. In a plain tree, frozen leaves and integers are None.
    """

    def pick(name: str, x: Any) -> Any:
        if is_sharded(x):
            return trainable(x)
        whole = isinstance(x, Tensor) and not _is_inexact(x)
        return None if whole or (frozen is not None and frozen(name)) else x

    paths, nodes, treedef = tree.flatten_with_path(params, is_leaf=is_sharded)
    return tree.unflatten(treedef, [pick(tree.name_of(p), x) for p, x in zip(paths, nodes, strict=True)])


def whole(params: Any, part: Any) -> Any:
    """Return `params` with its trainable part replaced by `part`, as `learning` selects it."""
    paths, nodes, treedef = tree.flatten_with_path(params, is_leaf=is_sharded)
    fresh = dict(zip(*tree.flatten_with_path(part, is_leaf=is_sharded)[:2], strict=True))
    return tree.unflatten(
        treedef,
        [with_trainable(x, fresh[p]) if is_sharded(x) else fresh.get(p, x) for p, x in zip(paths, nodes, strict=True)],
    )


def _is_inexact(x: Tensor) -> bool:
    return x.is_floating_point() or x.is_complex()
