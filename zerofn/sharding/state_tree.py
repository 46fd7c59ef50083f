"""Which subtrees of a state are laid out like its parameters, or like a part of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor

from .. import tree
from .layout import Layout, restrict
from .sharded import Spec


def _signature(x: Any) -> Any:
    leaves, treedef = tree.flatten(x)
    if not all(isinstance(v, Tensor) for v in leaves):
        return None
    return treedef, tuple(tuple(v.shape) for v in leaves)


def layout_like(x: Any, known: dict[Any, Layout]) -> Layout | None:
    """The layout for a subtree: that of its signature, or of the known one whose leaves it has in part, with
    None in place of the others (as moments have under a mask)."""
    signature = _signature(x)
    if signature is None or signature in known:
        return known.get(signature)
    shapes = {tree.name_of(path): tuple(v.shape) for path, v in zip(*tree.flatten_with_path(x)[:2], strict=True)}
    for layout in known.values():
        if all(name in layout.where and layout.where[name][1].shape == s for name, s in shapes.items()):
            part = restrict(layout, lambda _, leaf: leaf.name in shapes)
            if part.treedef == signature[0]:
                return part
    return None


def signature_of(layout: Layout) -> Any:
    """The structure and shapes of a tree that is laid out so, as a key."""
    return layout.treedef, tuple(leaf.shape for leaf in layout.leaves)


def sublayouts(layout: Layout, spec: Spec) -> Iterable[Layout]:
    """The layouts a subtree of the state may have: parts of params, its trainable part, params itself."""
    whole = tree.unflatten(layout.treedef, list(range(layout.treedef.num_leaves)))
    if isinstance(whole, Mapping):
        for key, value in whole.items():
            if isinstance(value, Mapping | list | tuple) and len(whole) > 1:
                try:
                    yield layout.subset(str(key))
                except KeyError:
                    continue  # shares a unit with its neighbour, so nothing can be cut like it
    yield spec.trainable.layout
    yield layout
