"""What optimizers share that send one bit an element: their state, and the choice between kinds of steps.

Up to the freeze step they send gradients, and are what they are without codes. From then on each rank's gradient goes
into its part of the momentum, of which signs are sent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from .. import tree
from ..sharding.coded_sums import check_ranks
from ..sharding.rank_entries import wide, zeros_in_shards, zeros_of_ranks
from ..sharding.sharded import Sharded, is_sharded
from .base import count_zero
from .phases import CODED, EXACT, Phase, PhasedState


@dataclass(frozen=True)
class OneBitState(PhasedState):
    """The state of optimizers that send one bit an element.

    `count`, `nu_count`: applied updates, and those of them that have changed `nu`; int64 scalars. `mu`, `nu`: Adam's
    averages, in the parameters' structure and dtype. `worker_error`: what the codes that a rank has sent have left out,
    an entry [*shape] for each rank: leaves [ranks, *shape]. `server_error`: what the codes of the sums have left out,
    in the parameters' structure, cut over ranks at every stage. Both in float32 at least. `phase`: the kind of its
    next step, part of the treedef: "exact" or "coded".
    """

    count: Tensor
    nu_count: Tensor
    mu: Any
    nu: Any
    worker_error: Any
    server_error: Any
    phase: str = EXACT

    stored_over: ClassVar[dict[str, str]] = {"worker_error": "ranks", "server_error": "shards"}


tree.register_dataclass(OneBitState, static=("phase",))


def initial(params: Any) -> OneBitState:
    """Return the state before the first update: zeros."""
    zeros = lambda: tree.tree_map(torch.zeros_like, params)  # noqa: E731
    count = count_zero(params)
    worker, server = (_map_nodes(params, each) for each in (_worker_zeros, _server_zeros))
    return OneBitState(count, count.clone(), zeros(), zeros(), worker, server)


def _worker_zeros(x: Any) -> Any:
    return zeros_of_ranks(x) if is_sharded(x) else torch.zeros((1, *x.shape), dtype=wide(x.dtype), device=x.device)


def _server_zeros(x: Any) -> Any:
    return zeros_in_shards(x) if is_sharded(x) else torch.zeros_like(x, dtype=wide(x.dtype))


def _map_nodes(params: Any, make: Callable[[Any], Any]) -> Any:
    return tree.tree_map(make, params, is_leaf=is_sharded)


def phase_at(freeze_step: int) -> Callable[[int], Phase]:
    """Return the kinds of steps of an optimizer that sends codes from a step on."""
    return lambda count: Phase(EXACT, freeze_step - count) if count < freeze_step else Phase(CODED)


def is_coded(p: Any) -> bool:
    """Return whether the sums of a node's gradients are sent as codes: it is cut over several ranks."""
    return is_sharded(p) and p.spec.mesh.batch.size > 1


def check_gradients(where: str, params: Any, grads: Any) -> None:
    """Raise `ValueError` for gradients that were added over ranks already, `NotImplementedError` for a mesh over which
    codes are not added.
    """
    for p, g in zip(*(tree.leaves(x, is_leaf=is_sharded) for x in (params, grads)), strict=True):
        if not is_coded(p):
            continue
        check_ranks(p.spec, where)
        if not (isinstance(g, Sharded) and g.spec.of_ranks):
            raise ValueError(
                f"{where}: from its freeze step on it adds gradients over ranks itself, and these are sums; write "
                "loss, grads = state.value_and_grad(loss_fn)(batch), which leaves them apart."
            )


def put_back(like: Any, shards: Iterator[Any]) -> Any:
    """Return a tree with the next of `shards` in place of each shard and plain leaf."""
    nodes, treedef = tree.flatten(like, is_leaf=is_sharded)
    made = [Sharded(x.spec, [next(shards) for _ in x.stored]) if is_sharded(x) else next(shards) for x in nodes]
    return tree.unflatten(treedef, made)
