"""Which experts get a token, with which weights, and the places of tokens in what is sent. All shapes are static."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from .. import tree
from ..util.arguments import checked
from ..util.errors import nearest

Priority = Literal["choice", "position", "probability"]
PRIORITIES = get_args(Priority)


@dataclass(frozen=True)
class Routing:
    """The experts of each token: a tree node. S tokens, k experts for each token, E experts, capacity C of each expert.

    `expert` int64 [k, S]: the experts of each token, its first choice first. `slot` int64 [k, S]: `expert * C +
    position`, or E * C for a dropped choice. `weight` [k, S]: the weight of an expert's output, 0 for a dropped choice;
    in the dtype of the gates. `counts` int64 [E]: number of tokens that chose each expert, including dropped ones.
    `num_experts`: E. `capacity`: C.

    >>> found = route(torch.tensor([[2.0, 0.0], [3.0, 0.0], [0.0, 1.0]]), capacity=0.5, min_capacity=1)
    >>> found.dropped, found.kept
    (tensor(1), tensor([[ True, False,  True]]))
    """

    expert: Tensor
    slot: Tensor
    weight: Tensor
    counts: Tensor
    num_experts: int
    capacity: int

    @property
    def num_slots(self) -> int:
        """The number of places, E * C."""
        return self.num_experts * self.capacity

    @property
    def kept(self) -> Tensor:
        """Which choices were accepted: bool [k, S]."""
        return self.slot < self.num_slots

    @property
    def dropped(self) -> Tensor:
        """How many choices were dropped: a 0-d int64 tensor."""
        return self.counts.sum() - self.kept.sum()


def _flatten(x: Routing) -> tuple[tuple[Tensor, ...], tuple[int, int]]:
    return (x.expert, x.slot, x.weight, x.counts), (x.num_experts, x.capacity)


def _unflatten(aux: tuple[int, int], children: Iterable[Any]) -> Routing:
    expert, slot, weight, counts = children
    return Routing(expert, slot, weight, counts, *aux)


tree.register_node(Routing, _flatten, _unflatten)


@checked("logits", "min_capacity", "noise", "noisy_first", "normalize", "used")
def route(
    logits: Tensor,
    k: int = 1,
    *,
    capacity: float | None = 1.0,
    min_capacity: int = 4,
    priority: Priority | Tensor = "choice",
    noise: Tensor | None = None,
    noisy_first: bool = True,
    normalize: bool | None = None,
    used: Tensor | None = None,
) -> Routing:
    """Choose k experts for every token. Each expert accepts at most C tokens; further choices are dropped.

    `logits` [S, E]: floating. The gates are their softmax, in float32 or float64. `capacity`: C is `capacity * k * S /
    E` rounded up, at least `min_capacity` and at most S; with 1,024 tokens, 8 experts, k = 2 and capacity 1.25, C is
    320. None means C = S, so that nothing is dropped. `priority`: which choices an expert accepts if too many tokens
    choose it: by "choice", all first choices before all second ones, tokens in order; by "position", tokens in order;
    by "probability", the largest gates; or a tensor [k, S] of priorities, of which an expert accepts the largest first
    (pass random numbers to accept random tokens).

    `noise` [S, E]: is added to the logits for the choice, not for the weights; see `gumbel`. `noisy_first=False`:
    choose the first expert without noise. `normalize`: scale the weights of a token's accepted choices so that they sum
    to 1; by default for k > 1. `used` bool [S]: tokens with False go to no expert.

    A pure function; `Routing.weight` is differentiable in `logits`. Raises `ValueError` for shapes that do not fit, for
    k > E, and for a capacity that drops everything.

    >>> found = route(torch.tensor([[2.0, 0.0], [3.0, 0.0], [0.0, 1.0]]), capacity=0.5, min_capacity=1)
    >>> found.slot, found.counts
    (tensor([[0, 2, 1]]), tensor([2, 1]))
    """
    num_tokens, num_experts = _sizes(logits, k)
    places = places_of(num_tokens, num_experts, k, capacity, min_capacity)
    _check_shape("noise", noise, (num_tokens, num_experts))
    _check_shape("used", used, (num_tokens,))
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    gates = torch.softmax(logits, -1)
    expert = _chosen(logits.detach(), k, noise, noisy_first)
    weight = gates.gather(1, expert.t()).t()
    order = order_of(priority, weight.detach())
    found = placed(expert, weight, num_experts, places, order, used)
    if k > 1 if normalize is None else normalize:
        weight = found.weight / found.weight.sum(0).clamp_min(torch.finfo(weight.dtype).eps)
        return replace(found, weight=weight)
    return found


def placed(
    expert: Tensor,
    weight: Tensor,
    num_experts: int,
    places: int,
    order: Tensor | None = None,
    used: Tensor | None = None,
) -> Routing:
    """Give choices, in the order of `order`, places among those of their experts; without a place the weight is 0.

    `expert` int64 [k, S], `weight` [k, S]: the choices. `places`: of each expert. `order`: see `order_of`.
    """
    there = expert.unsqueeze(-1) == torch.arange(num_experts, device=expert.device)
    if used is not None:
        there = there & used.unsqueeze(-1)
    place, counts = _places(there, order)
    kept = there.any(-1) & (place < places)
    slot = torch.where(kept, expert * places + place, num_experts * places)
    return Routing(expert, slot, torch.where(kept, weight, torch.zeros_like(weight)), counts, num_experts, places)


def _sizes(logits: Tensor, k: int) -> tuple[int, int]:
    """Return the numbers of tokens and experts."""
    if logits.dim() != 2 or not logits.is_floating_point() or not logits.numel():
        raise ValueError(
            f"moe.route: expected floating logits [tokens, experts], got {logits.dtype} {list(logits.shape)}. For "
            "several rows, write x.reshape(-1, x.shape[-1])."
        )
    num_tokens, num_experts = logits.shape
    if not isinstance(k, int) or isinstance(k, bool) or k < 1:
        raise ValueError(f"moe.route: k={k!r}, the number of experts for each token, must be 1 or more.")
    if k > num_experts:
        raise ValueError(
            f"moe.route: k={k} experts for each token are more than the {num_experts} experts of the "
            f"layer. Write k={num_experts} or less."
        )
    return num_tokens, num_experts


def places_of(num_tokens: int, num_experts: int, k: int, capacity: float | None, min_capacity: int) -> int:
    """Return the number of places of each expert for the tokens of one rank.

    Raises `ValueError` for a capacity that is not a number or drops everything.
    """
    if not isinstance(min_capacity, int) or isinstance(min_capacity, bool) or min_capacity < 0:
        raise ValueError(f"moe.route: min_capacity={min_capacity!r}, a number of tokens, must be 0 or more.")
    if capacity is None:
        return num_tokens
    if isinstance(capacity, bool) or not isinstance(capacity, int | float) or not math.isfinite(capacity):
        raise ValueError(f"moe.route: capacity={capacity!r} must be a factor, such as 1.25, or None to drop no tokens.")
    # The decimal that was written: 1.1 * 10 is 11 then, and not the next number above.
    places = max(math.ceil(Fraction(str(capacity)) * k * num_tokens / num_experts), min_capacity)
    if places < 1:
        raise ValueError(
            f"moe.route: capacity={capacity} and min_capacity={min_capacity} would drop all tokens. Write a capacity "
            "above 0, or None to drop no tokens."
        )
    return min(places, num_tokens)


def _check_shape(what: str, x: Tensor | None, shape: tuple[int, ...]) -> None:
    if x is not None and tuple(x.shape) != shape:
        raise ValueError(f"moe.route: {what} has shape {list(x.shape)}, expected {list(shape)}.")


def _chosen(logits: Tensor, k: int, noise: Tensor | None, noisy_first: bool) -> Tensor:
    """Return the experts of each token, int64 [k, S]."""
    scores = logits if noise is None else logits + noise.detach()
    if noise is not None and not noisy_first:
        scores = scores.scatter(1, logits.argmax(1, keepdim=True), math.inf)
    return scores.topk(k, 1).indices.t()


def order_of(priority: str | Tensor, weight: Tensor) -> Tensor | None:
    """Return the choices [k * S] in the order in which they get their places; None for the order in which they are."""
    if isinstance(priority, Tensor):
        _check_shape("priority", priority, tuple(weight.shape))
        return priority.detach().reshape(-1).argsort(descending=True, stable=True)
    if priority == "choice":
        return None
    if priority == "position":
        return torch.arange(weight.numel(), device=weight.device).view(weight.shape).t().reshape(-1)
    if priority == "probability":
        return weight.reshape(-1).argsort(descending=True, stable=True)
    near = nearest(priority, PRIORITIES, 1) if isinstance(priority, str) else ()
    hint = (
        f"; did you mean {near[0]!r}?"
        if near
        else (f"; expected one of {', '.join(PRIORITIES)}, or a tensor [k, tokens].")
    )
    raise ValueError(f"moe.route: priority={priority!r} is not known{hint}")


def _places(there: Tensor, order: Tensor | None) -> tuple[Tensor, Tensor]:
    """Count the choices of each expert. `there` [k, S, E]: whether a choice is of an expert.

    -> the place of each choice among those of its expert, [k, S], and their number, [E]. 0 for a choice of none.
    """
    k, num_tokens, num_experts = there.shape
    flat = there.reshape(-1, num_experts)
    ordered = flat if order is None else flat.index_select(0, order)
    places = ((ordered.cumsum(0) - 1) * ordered).sum(1)
    if order is not None:
        places = torch.zeros_like(places).scatter(0, order, places)
    return places.view(k, num_tokens), flat.sum(0)
