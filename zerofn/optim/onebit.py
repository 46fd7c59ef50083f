"""What optimizers share that send one bit an element: their state, and the choice between kinds of steps.

Up to the freeze step they send gradients, and are what they are without codes. From then on each rank's gradient goes
into its part of the momentum, of which signs are sent.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from .. import tree
from ..geometry.layout import Unit
from ..ops.kernel_args import GRADIENTS
from ..sharding.coded_sums import CodedSum, check_ranks, coded_sum
from ..sharding.rank_entries import wide, zeros_in_shards, zeros_of_ranks
from ..sharding.sharded import Sharded, is_sharded
from ..sharding.spec import Spec
from . import checks
from .base import count_zero
from .phases import CODED, EXACT, Phase, PhasedState


@dataclass(frozen=True)
class OneBitState(PhasedState):
    """The state of optimizers that send one bit per element.

    `count`, `nu_count`: number of applied updates, and of those that changed `nu`; int64 scalars. `mu`, `nu`: Adam's
    averages, in the parameters' structure and dtype. `worker_error`: the errors of the signs that a rank sent, one
    entry [*shape] for each rank: leaves [ranks, *shape]. `server_error`: the errors of the sums' signs, in the
    parameters' structure, sharded at every stage. Both in float32 or float64. `phase`: the kind of its next step, part
    of the treedef: "exact" or "coded".

    >>> from zerofn import optim
    >>> state = optim.onebit_adam(1e-3, freeze_step=1000).init({"w": torch.zeros(2)})
    >>> state.phase, state.worker_error["w"].shape  # of one rank
    ('exact', torch.Size([1, 2]))
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
    worker, server = (tree.tree_map(each, params, is_leaf=is_sharded) for each in (_worker_zeros, _server_zeros))
    return OneBitState(count, count.clone(), zeros(), zeros(), worker, server)


def _worker_zeros(x: Any) -> Any:
    return zeros_of_ranks(x) if is_sharded(x) else torch.zeros((1, *x.shape), dtype=wide(x.dtype), device=x.device)


def _server_zeros(x: Any) -> Any:
    return zeros_in_shards(x) if is_sharded(x) else torch.zeros_like(x, dtype=wide(x.dtype))


def phase_at(freeze_step: int) -> Callable[[int], Phase]:
    """Return the kinds of steps of an optimizer that sends codes from a step on."""
    return lambda count: Phase(EXACT, freeze_step - count) if count < freeze_step else Phase(CODED)


class OneBitRule(ABC):
    """The steps of an optimizer of this name. `apply`: a whole step, see `base.Apply`."""

    def __init__(self, name: str) -> None:
        self._name = name

    @abstractmethod
    def apply(
        self, grads: Any, state: Any, params: Any, factor: Tensor | None, finite: Tensor | None
    ) -> tuple[Any, Any]:
        """Return the next parameters and state."""

    def update(self, grads: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        """Return what a step adds to the parameters."""
        checks.needs_params(self._name, params)
        fresh, state = self.apply(grads, state, params, None, None)
        return tree.tree_map(torch.sub, fresh, params), state


class Place(NamedTuple):
    """A unit whose sums are sent as codes."""

    spec: Spec
    unit: Unit


def units_of(*trees: Any) -> Iterator[tuple[Place | None, tuple[Any, ...]]]:
    """Yield (where, the tensors of all trees) of each unit and plain leaf; None where nothing is sent as codes."""
    for node in zip(*(tree.leaves(x, is_leaf=is_sharded) for x in trees), strict=True):
        first = node[0]
        if not is_sharded(first):
            yield None, node
            continue
        for unit, *columns in zip(first.layout.units, *(x.shards for x in node), strict=True):
            yield Place(first.spec, unit) if is_coded(first) and unit.size else None, tuple(columns)


def next_momentum(
    place: Place, b1: float, m: Tensor, g: Tensor, worker: Tensor, server: Tensor, finite: Tensor | None = None
) -> Generator[None, None, CodedSum]:
    """Return the momentum of a unit with one more gradient, and what codes have left out. `finite`: see `coded_sum`, as
    which it pauses.
    """
    found = yield from coded_sum(
        place.spec,
        place.unit,
        m.float(),
        worker=worker.float(),
        server=server.float(),
        decay=b1,
        added=g if g.dtype in GRADIENTS else g.float(),
        by=1 - b1,
        finite=finite,
    )
    return found._replace(worker=found.worker.to(worker.dtype), server=found.server.to(server.dtype))


def plain_momentum(b1: float, m: Tensor, g: Tensor) -> Tensor:
    """Return the momentum with one more gradient, which is a sum already."""
    return (m + (1 - b1) * (g.to(m.dtype) - m)).to(m.dtype)


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
        check_ranks(p.spec, f"{where}:")
        if not (isinstance(g, Sharded) and g.spec.of_ranks):
            raise ValueError(
                f"{where}: after its freeze step, the optimizer needs each rank's own gradients, but these gradients "
                "are already averaged over ranks. Write loss, grads = state.value_and_grad(loss_fn)(batch), which does "
                "not average them."
            )


def put_back(likes: Sequence[Any], found: Sequence[Sequence[Any]]) -> list[Any]:
    """Return trees like `likes`. `found`: for each unit and plain leaf, its tensor of each tree."""
    columns: Iterable[Any] = zip(*found, strict=True) if found else [()] * len(likes)
    return [_put_back(x, iter(column)) for x, column in zip(likes, columns, strict=True)]


def _put_back(like: Any, shards: Iterator[Any]) -> Any:
    nodes, treedef = tree.flatten(like, is_leaf=is_sharded)
    made = [Sharded(x.spec, [next(shards) for _ in x.stored]) if is_sharded(x) else next(shards) for x in nodes]
    return tree.unflatten(treedef, made)
