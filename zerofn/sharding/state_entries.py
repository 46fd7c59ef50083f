"""What a state holds before it is cut: its parameters, and its leaves as tensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from .. import tree
from .precision import Precision
from .sharded import is_sharded


def device_of(state: Any) -> torch.device:
    """Where the parameters are; where there are only shapes, or on several devices, the host."""
    states = [x for x in tree.leaves(state, is_leaf=is_state) if is_state(x)]
    devices = {x.device for s in states for x in tree.leaves(params_of(s)) if isinstance(x, Tensor)}
    return devices.pop() if len(devices) == 1 and "meta" not in {d.type for d in devices} else torch.device("cpu")


def is_state(x: Any) -> bool:
    """Whether `x` is a container with an entry named `params`."""
    if isinstance(x, Mapping):
        return "params" in x
    if hasattr(x, "keys") and hasattr(x, "batch_size"):  # a TensorDict
        return "params" in x.keys()
    return not isinstance(x, type | Tensor) and hasattr(x, "params") and not is_sharded(x)


def params_of(state: Any) -> Any:
    """What holds the parameters of a container that `is_state`."""
    return state.params if hasattr(state, "params") else state["params"]


def adapted(state: Any, precision: Precision) -> Any:
    """The state with numbers as tensors, and what the precision needs added. Raises for what cannot be state."""
    nodes, treedef = tree.flatten(state, is_leaf=is_state)
    if not any(is_state(x) for x in nodes):
        raise ValueError(
            f"shard: found no entry named 'params' in the state ({type(state).__name__}); the "
            "parameters go there: {'params': dict(model.named_parameters()), ...} or a TrainState."
        )
    if any(map(is_sharded, tree.leaves(state, is_leaf=is_sharded))):
        raise TypeError("shard: the state is already sharded; write shard(unshard(state), ...) to lay it out anew.")
    nodes = [x.with_precision(precision) if hasattr(x, "with_precision") else x for x in nodes]
    paths, leaves, treedef = tree.flatten_with_path(tree.unflatten(treedef, nodes))
    return tree.unflatten(treedef, [_tensor(tree.name_of(p), x) for p, x in zip(paths, leaves, strict=True)])


def _tensor(name: str, x: Any) -> Tensor:
    if isinstance(x, Tensor):
        return x
    if isinstance(x, bool | int | float):
        return as_tensor(x)
    raise TypeError(
        f"shard: leaf {name!r} is a {type(x).__name__}; a state's leaves are tensors, ints, floats, "
        "bools and None. Keep other things outside the state."
    )


def as_tensor(x: bool | int | float) -> Tensor:
    """A number of a state as the 0-d tensor it becomes: bool, int64 or float64."""
    return torch.full((), x, dtype={bool: torch.bool, int: torch.int64, float: torch.float64}[type(x)])
