"""Send tokens to the ranks of their experts, and the experts' outputs back: one all-to-all each, of a fixed size.

A rank sends every expert C rows, places that no token has as zeros. Nothing depends on where tokens go but the values
that are sent, so shapes are static, and the host never waits for a number.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import tree
from ..collectives import all_to_all
from ..comm.current_mesh import axis_of
from ..comm.mesh import Axis
from ..util.arguments import checked
from .routing import Routing


def experts_here(num_experts: int, axis: str | Axis | None, what: str) -> tuple[int, int]:
    """Return (experts of each rank, ranks). Raises `ValueError` for experts that ranks cannot divide."""
    if axis is None:
        return num_experts, 1
    where = axis_of(axis)
    if num_experts % where.size:
        raise ValueError(
            f"{what}: {where.size} ranks along {where.name!r} cannot divide {num_experts} experts equally. Use a "
            f"multiple of {where.size} experts, or another axis."
        )
    return num_experts // where.size, where.size


@checked()
def dispatch(x: Tensor, routing: Routing, axis: str | Axis | None = None) -> Tensor:
    """Send each token to its experts.

    `x` [S, d]: this rank's tokens, any dtype. `routing`: the result of `route` for these tokens. `axis`: the ranks over
    which experts are divided, a name or an `Axis`; rank r has E / size experts from r * E / size on. None: this rank
    has all experts.

    -> [E / size, size * C, d] in the dtype and on the device of `x`: for each expert of this rank the rows of all
    ranks, C of each, in rank order; unused rows are zeros. Linear in `x`. With `axis` all ranks must call it, with
    equal shapes. Raises `ValueError` for shapes that do not fit, for a number of experts that the ranks do not divide,
    and for an axis that does not exist.

    >>> from zerofn.moe import route
    >>> x, logits = torch.tensor([[1.0], [2.0], [3.0]]), torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 0.0]])
    >>> dispatch(x, route(logits, min_capacity=2)).squeeze(-1)
    tensor([[1., 3.],
            [2., 0.]])
    """
    here, size = experts_here(routing.num_experts, axis, "moe.dispatch")
    k, num_tokens = routing.slot.shape
    if x.dim() != 2 or x.shape[0] != num_tokens:
        raise ValueError(
            f"moe.dispatch: expected the {num_tokens} tokens that were routed, [{num_tokens}, d], got {list(x.shape)}."
        )
    width, capacity = x.shape[1], routing.capacity
    # Each place has one token at most, so this writes and adds nothing up; what is dropped goes to a row behind.
    rows = x.expand(k, num_tokens, width).reshape(-1, width)
    sent = x.new_zeros(routing.num_slots + 1, width).index_put((routing.slot.reshape(-1),), rows)[:-1]
    if axis is None or size == 1:
        return sent.view(here, capacity, width)
    got = all_to_all(sent.view(size, here, capacity, width), axis)
    return got.movedim(0, 1).reshape(here, size * capacity, width)


@checked()
def combine(y: Tensor, routing: Routing, axis: str | Axis | None = None) -> Tensor:
    """Send experts' outputs back, and return the weighted sum of each token's outputs.

    `y` [E / size, size * C, d]: the outputs of this rank's experts for the rows that `dispatch` returned, floating; d
    may differ from that of the tokens. `routing`, `axis`: as for `dispatch`.

    -> [S, d] in the dtype and on the device of `y`; zeros for tokens that no expert accepted. Linear in `y`, and
    differentiable in `routing.weight`. With `axis` all ranks must call it, with equal shapes. Raises the errors of
    `dispatch`.

    >>> from zerofn.moe import route
    >>> routing = route(torch.zeros(3, 1))
    >>> combine(torch.ones(1, 3, 2), routing)[0]
    tensor([1., 1.])
    """
    here, size = experts_here(routing.num_experts, axis, "moe.combine")
    capacity = routing.capacity
    if y.dim() != 3 or tuple(y.shape[:2]) != (here, size * capacity):
        raise ValueError(
            f"moe.combine: expected the experts' outputs [{here}, {size * capacity}, d], one row for each row that "
            f"dispatch returned, got {list(y.shape)}."
        )
    width = y.shape[2]
    if axis is not None and size > 1:
        y = all_to_all(y.view(here, size, capacity, width).movedim(1, 0).contiguous(), axis)
    flat, (k, num_tokens) = y.reshape(-1, width), routing.slot.shape
    rows = flat.index_select(0, routing.slot.reshape(-1).clamp_max(routing.num_slots - 1)).view(k, num_tokens, width)
    # What was dropped reads some expert's row, which may be anything.
    rows = torch.where(routing.kept.unsqueeze(-1), rows, torch.zeros_like(rows))
    return (rows * routing.weight.unsqueeze(-1).to(rows.dtype)).sum(0)


@checked()
def own(experts: Any, axis: str | Axis) -> Any:
    """Return this rank's experts of parameters that hold all experts, because they were gathered.

    `experts`: a tree of tensors [E, ...]. `axis`: see `dispatch`.

    -> the tree with views [E / size, ...]. The gradient is zero for experts of other ranks, so the mean over ranks in
    `value_and_grad` is the gradient of the global batch; a loss (sum, weight) then needs the same weight on all ranks.
    On a mesh with an axis `expert`, use `cuts` instead, which never gathers all experts. Raises `ValueError` for a
    number of experts that the ranks do not divide, and for an axis that does not exist.

    >>> own({"w": torch.ones(4, 2)}, "data")["w"].shape
    torch.Size([4, 2])
    """
    rank = axis_of(axis).rank

    def part(x: Tensor) -> Tensor:
        here, _ = experts_here(x.shape[0], axis, "moe.own")
        return x.narrow(0, rank * here, here)

    return tree.tree_map(part, experts)
