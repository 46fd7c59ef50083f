"""Adam's moments from checkpoints of others."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

import zerofn

from ..util.arguments import told

MOMENTS = ("exp_avg", "exp_avg_sq")  # torch's names of mu and nu


def params_of(what: str, like: Any) -> Any:
    """Return a state's parameters. Raises `TypeError` for anything but a state."""
    if not hasattr(like, "params") or not hasattr(like, "opt_state"):
        raise TypeError(f"{what}: like must be a TrainState, got {told(like)}.")
    return like.params


def names_of(tree: Any) -> list[str]:
    """Return the names of a tree's leaves."""
    if isinstance(tree, zerofn.Sharded):
        return list(tree.layout.where)
    return [name for name, x in tree.items() if x is not None]


def with_moments(
    what: str, source: Any, opt_state: Any, find: Callable[[Any, str], Mapping[str, Any]], count: Callable[[Any], int]
) -> tuple[Any, int]:
    """Return (the optimizer's state with the moments that were found, their step count).

    `find(tree, kind)`: the tensors of a kind, by the names of the tree. `count(tree)`: the step count. Raises
    `zerofn.CheckpointError`, which begins with `what` and names the `source`, unless there is one `AdamState`.
    """
    counts: list[int] = []

    def filled(x: Any) -> Any:
        if not isinstance(x, zerofn.optim.AdamState):
            return x

        def second() -> Mapping[str, Any]:
            counts.append(count(x.mu))
            return find(x.nu, MOMENTS[1])

        mu = zerofn.load_state_dict(lambda: find(x.mu, MOMENTS[0]), like=x.mu)
        nu = zerofn.load_state_dict(second, like=x.nu)
        return x._replace(count=torch.full_like(x.count, counts[-1]), mu=mu, nu=nu)

    new = zerofn.tree_map(filled, opt_state, is_leaf=lambda x: isinstance(x, zerofn.optim.AdamState))
    if len(counts) != 1:
        raise zerofn.CheckpointError(
            f"{what}: {source} has the moments of one Adam optimizer, but `like` has {len(counts)} AdamStates. Make "
            "`like` with tx=zerofn.optim.adamw(...), or pass only='params'."
        )
    return new, counts[0]
