"""Which element of a source each element of a value is, where operations have only moved elements."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from ..ops.registry import COPIES, MOVES, SAME
from .known_values import Values

aten = torch.ops.aten
_MOST = 1 << 24  # elements that are followed


def root_of(node: Node) -> Node:
    """Return the node whose elements an operation, or several, have moved; the node itself if there is none."""
    while node.target in MOVES or _is_same(node):
        node = node.args[0]  # type: ignore[assignment]
    return node


def elements_of(values: Values, node: Node, source: Node) -> Tensor | None:
    """Return the number of the element of `source` that each element of a value is, int64 in its shape, -1 for what
    comes from elsewhere, beside it; None if the value is not made so. `values`: by which indices are known.
    """
    note = node.meta["val"]
    if values.is_written(node) or not all(type(n) is int for n in note.shape):
        return None
    if node is source:
        return torch.arange(note.numel()).view(note.shape) if note.numel() <= _MOST else None
    if node.target is aten.cat.default:
        given: Any = node.args[0]
        parts = [elements_of(values, x, source) for x in given]
        parts = [torch.full(x.meta["val"].shape, -1) if y is None else y for x, y in zip(given, parts, strict=True)]
        return torch.cat(parts, *node.args[1:]) if note.numel() <= _MOST else None  # type: ignore[arg-type]
    is_same = _is_same(node)
    if not is_same and node.target not in MOVES:
        return None
    x = elements_of(values, node.args[0], source)  # type: ignore[arg-type]
    if x is None or is_same:
        return x
    args: Any = node.args[1:]
    if node.target is aten.index.Tensor:
        indices = [None if i is None else values.of(i) for i in args[0]]
        if any(y is None and i is not None for i, y in zip(args[0], indices, strict=True)):
            return None
        args = (indices,)
    found: Tensor = node.target(x, *args, **node.kwargs)  # type: ignore[operator]
    return found


def _is_same(node: Node) -> bool:
    """Return whether a value has the numbers of the one that it is made of, element by element."""
    if node.target not in (*SAME, *COPIES):
        return False
    given = node.args[0]
    assert isinstance(given, Node)
    old, new = given.meta["val"].dtype, node.meta["val"].dtype
    return old == new or (old, new) == (torch.int32, torch.int64)
