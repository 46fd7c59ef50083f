"""Find the subtrees of a state that have the layout of its parameters, or of a part of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from .. import tree
from ..geometry.layout import Layout, restrict
from ..util.constants import special_values
from .precision import Precision
from .sharded import is_sharded


def _signature(x: Any, first: int = 0) -> Any:
    leaves, treedef = tree.flatten(x)
    if not all(isinstance(v, Tensor) for v in leaves):
        return None
    return treedef, tuple(tuple(v.shape[first:]) for v in leaves)


def layout_like(x: Any, known: dict[Any, Layout], first: int = 0) -> Layout | None:
    """Return the layout for a subtree: the known one with its signature, or one whose leaves it has in part, with None
    for the others (as moments have under a mask). `first`: how many dims come before those of a leaf.
    """
    signature = _signature(x, first)
    if signature is None or signature in known:
        return known.get(signature)
    found = zip(*tree.flatten_with_path(x)[:2], strict=True)
    shapes = {tree.name_of(path): tuple(v.shape[first:]) for path, v in found}
    for layout in known.values():
        if all(name in layout.where and layout.where[name][1].whole == s for name, s in shapes.items()):
            part = restrict(layout, lambda _, leaf: leaf.name in shapes)
            if part.treedef == signature[0]:
                return part
    return None


def signature_of(layout: Layout) -> Any:
    """Return the structure and shapes of a tree with this layout, as a key."""
    return layout.treedef, tuple(leaf.whole for leaf in layout.leaves)


def sublayouts(layout: Layout) -> Iterable[Layout]:
    """Return the layouts a subtree of the state may have: parts of `params`, its trainable part, `params` itself."""
    whole = tree.unflatten(layout.treedef, list(range(layout.treedef.num_leaves)))
    if isinstance(whole, Mapping):
        for key, value in whole.items():
            if isinstance(value, Mapping | list | tuple) and len(whole) > 1:
                try:
                    yield layout.subset(str(key))
                except KeyError:
                    continue  # it shares a unit with its neighbour, so nothing can have its layout
    yield restrict(layout, lambda unit, _: unit.trainable)
    yield layout


def device_of(state: Any) -> torch.device:
    """Return the parameters' device; the host if there are only shapes, or several devices."""
    states = [x for x in tree.leaves(state, is_leaf=is_state) if is_state(x)]
    devices = {x.device for s in states for x in tree.leaves(params_of(s)) if isinstance(x, Tensor)}
    return devices.pop() if len(devices) == 1 and "meta" not in {d.type for d in devices} else torch.device("cpu")


def is_state(x: Any) -> bool:
    """Return whether `x` is a container with an entry named `params`."""
    if isinstance(x, Mapping):
        return "params" in x
    if hasattr(x, "keys") and hasattr(x, "batch_size"):  # a TensorDict
        return "params" in x.keys()
    return not isinstance(x, type | Tensor) and hasattr(x, "params") and not is_sharded(x)


def params_of(state: Any) -> Any:
    """Return the `params` entry of a container that `is_state`."""
    return state.params if hasattr(state, "params") else state["params"]


def adapted(state: Any, precision: Precision) -> Any:
    """Return the state with numbers as tensors, and with what the precision adds. Raises for what cannot be state."""
    nodes, treedef = tree.flatten(state, is_leaf=is_state)
    if not any(is_state(x) for x in nodes):
        raise ValueError(
            f"shard: the state (a {type(state).__name__}) has no entry 'params', which holds the parameters. Write "
            "{'params': dict(model.named_parameters()), ...}, or make a zerofn.TrainState."
        )
    if any(map(is_sharded, tree.leaves(state, is_leaf=is_sharded))):
        raise TypeError(
            "shard: the state is already sharded. To shard it in another way, write shard(unshard(state), ...)."
        )
    if precision.feeds_back and not any(hasattr(x, "feedback") for x in nodes):
        raise ValueError(
            "shard: feedback=True stores the rounding errors of gradients in the state, and only a zerofn.TrainState "
            "has a field for them. Write shard(zerofn.TrainState.create(params=params, tx=tx), wire=...)."
        )
    nodes = [x.with_precision(precision) if hasattr(x, "with_precision") else x for x in nodes]
    paths, leaves, treedef = tree.flatten_with_path(tree.unflatten(treedef, nodes))
    return tree.unflatten(treedef, [_tensor(tree.name_of(p), x) for p, x in zip(paths, leaves, strict=True)])


def _tensor(name: str, x: Any) -> Tensor:
    if isinstance(x, Tensor):
        special = special_values(x) or ("is sparse: pass x.to_dense()" if x.is_sparse or x.is_sparse_csr else "")
        if special:
            raise TypeError(f"shard: leaf {name!r} {special}.")
        return x
    if isinstance(x, bool | int | float):
        return as_tensor(x)
    raise TypeError(
        f"shard: leaf {name!r} is a {type(x).__name__}; a state's leaves are tensors, ints, floats, bools and None. "
        "Write torch.as_tensor(...) for a NumPy array, and store other objects outside the state."
    )


def as_tensor(x: bool | int | float) -> Tensor:
    """Return the 0-d tensor for a number of a state: bool, int64 or float64."""
    dtype = torch.bool if isinstance(x, bool) else torch.int64 if isinstance(x, int) else torch.float64
    return torch.full((), x, dtype=dtype)
