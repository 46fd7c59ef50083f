"""Unmodified models of transformers whose experts are shared by the ranks of the mesh's axis "expert".

A rank has whole experts and rows of its own. Its tokens go to the ranks of their experts, which are computed there by
the model's own code, and the results come back. Sizes are static: the host never asks where tokens go.

Without a capacity every rank gets the tokens of all, computes what its experts add to them, and each gets back the sum
for its own. So nothing can be dropped, and a token is sent once to every rank, however many of its experts are there.
With a capacity, an expert has this number of places for the tokens of each rank, and only these are sent.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from ..collectives import all_gather, reduce_scatter
from ..comm.axes import EXPERT
from ..comm.mesh import Axis, Mesh
from ..geometry.cuts import Cut, equal
from ..parallel.cut_experts import CutExperts
from ..parallel.plan import WORDS as TENSOR_WORDS
from ..parallel.plan import did_you_mean
from ..util.arguments import checked
from ..util.context import inside
from ..util.errors import nearest
from ..util.patterns import matches
from .exchange import combine, dispatch
from .router_logits import of_whole_batch
from .routing import order_of, placed, places_of

_CUT, _DISPATCH, _WHOLE = "grouped_gemm", "ep_dispatch_experts", "replicated_with_grad_allreduce"
_WORDS = (_CUT, _DISPATCH, _WHOLE)

Forward = Callable[[Tensor, Tensor, Tensor], Tensor]

_counted: ContextVar[list[Tensor] | None] = ContextVar("dropped_choices", default=None)


@checked("plan")
def experts(
    model: nn.Module, mesh: Mesh, plan: Mapping[str, str] | None = None, *, capacity: float | None = None
) -> dict[str, Cut | tuple[Cut, ...]]:
    """Divide a skeleton's experts over the mesh's axis "expert"; return the cuts, for `shard`.

        mesh = zerofn.Mesh.make(data=-1, expert=2)
        model = zerofn.skeleton(build)
        state = zerofn.shard(init_state, mesh=mesh, cuts=zerofn.moe.experts(model, mesh))

    `plan`: module or parameter name, with `*` for any one component -> a word of transformers' `ep_plan`; by default
    the model's own. `ep_dispatch_experts`: a module of experts, which are divided over the ranks; `grouped_gemm`: a
    parameter of such a module, one row for each expert [E, ...]; `replicated_with_grad_allreduce`: a parameter of such
    a module that all ranks hold. `capacity`: an expert accepts `capacity * k * S / E` of a rank's S tokens, rounded up,
    those with the largest weights; further choices are dropped, and counted by `dropped`. None drops nothing.

    With tensor parallelism, call `zerofn.parallel.tensor` first, and pass both cuts to `shard`:
    `cuts=zerofn.parallel.tensor(model, mesh) | zerofn.moe.experts(model, mesh)`. If the tensor plan cuts experts, a
    rank then has a slice of each of its experts, otherwise whole experts.

    A model with `output_router_logits` adds the load-balance loss of the global batch. In every step, all ranks need
    the same number of tokens.

    Raises `ValueError` for a mesh without the axis, a model without a plan, an entry that matches nothing, an unknown
    word, a capacity that is not positive, and for a number of experts that the ranks do not divide; `TypeError` for a
    module that does not follow the conventions of experts in transformers.
    """
    axis, name, own = mesh.axis(EXPERT), type(model).__name__, plan is None
    _check_capacity(capacity)
    if plan is None:
        plan = getattr(model, "ep_plan", None) or {}
        if not plan:
            raise ValueError(
                f"moe.experts: {name} has no ep_plan. Write plan={{'layers.*.mlp.experts': {_DISPATCH!r}, "
                f"'layers.*.mlp.experts.up': {_CUT!r}, ...}}, or use zerofn.moe.layer in your own model."
            )
    words = _named(model, plan, own)
    found: dict[str, Cut | tuple[Cut, ...]] = {}
    for where, part in model.named_modules():
        if words.get(where) == _DISPATCH:
            found |= _share(where, part, words, axis, capacity)
    odd = [where for where, word in words.items() if word != _DISPATCH and where.rpartition(".")[0] not in words]
    if odd or not found:
        raise ValueError(
            f"moe.experts: the plan of {name} has the parameter {odd[0]!r}, but not its module. Add "
            f"{odd[0].rpartition('.')[0]!r}: {_DISPATCH!r}."
            if odd
            else f"moe.experts: the plan of {name} matches none of its modules of experts."
        )
    of_whole_batch(model, mesh)
    return found if axis.size > 1 else {}


def dropped() -> contextlib.AbstractContextManager[list[Tensor]]:
    """Return a context that counts dropped choices of experts, in each layer of a model that `experts` has changed.

        def loss_fn(params, batch):
            with zerofn.moe.dropped() as counts:
                loss = functional_call(model, params, (), batch).loss
            return loss, sum(counts)

        (loss, lost), grads = state.value_and_grad(loss_fn, has_aux=True)(batch)

    -> a list. Each layer appends a 0-d int64 tensor: how many of this rank's choices, k for each token, were dropped.

    >>> with dropped() as counts:
    ...     pass
    >>> counts
    []
    """
    return inside(_counted, [])


def _check_capacity(capacity: float | None) -> None:
    if capacity is None:
        return
    number = isinstance(capacity, int | float) and not isinstance(capacity, bool)
    if not number or not math.isfinite(capacity) or capacity <= 0:
        raise ValueError(
            f"moe.experts: capacity={capacity!r} must be a factor above 0, such as 1.25, or None to drop no tokens."
        )


def _named(model: nn.Module, plan: Mapping[str, str], own: bool) -> dict[str, str]:
    """Return the word for each module and parameter. `own`: the model's own plan, which is that of its whole family."""
    modules = [name for name, _ in model.named_modules() if name]
    params = [name for name, _ in model.named_parameters()]
    words: dict[str, str] = {}
    keys: dict[str, str] = {}
    for key, word in plan.items():
        _check_word(key, word)
        among = modules if word == _DISPATCH else params
        found = [name for name in among if matches(key, name)]
        if not found and not own:
            raise ValueError(
                f"moe.experts: plan[{key!r}]={word!r} matches no {'module' if among is modules else 'parameter'}"
                f"{did_you_mean(key, among)}"
            )
        for name in found:
            if name in keys:
                raise ValueError(
                    f"moe.experts: plan[{key!r}] and plan[{keys[name]!r}] both match {name!r}; leave one out."
                )
            keys[name], words[name] = key, word
    return words


def _check_word(key: str, word: Any) -> None:
    if word in _WORDS:
        return
    near = nearest(word, _WORDS, 1) if isinstance(word, str) else ()
    if near:
        hint = f"; did you mean {near[0]!r}?"
    elif word in TENSOR_WORDS:
        hint = ", but is a word of tp_plan. Leave it out of plan=, and use zerofn.parallel.tensor for it."
    else:
        hint = f"; expected one of {', '.join(_WORDS)}."
    raise ValueError(f"moe.experts: plan[{key!r}]={word!r} is not a word for experts{hint}")


def _share(
    where: str, part: nn.Module, words: Mapping[str, str], axis: Axis, capacity: float | None
) -> dict[str, Cut | tuple[Cut, ...]]:
    """Let a module compute with a rank's experts; return the cuts of its parameters."""
    held: Any = part  # of which attributes are read and set
    over = part.forward if isinstance(part.forward, CutExperts) else None
    if isinstance(part.forward, _Shared) or (over and isinstance(over.forward, _Shared)):
        raise ValueError(
            f"moe.experts: the experts of {where!r} are already divided over ranks. Make a new skeleton "
            "to divide them again."
        )
    if not hasattr(part, "_is_expert_parallel") or not isinstance(getattr(part, "num_experts", None), int):
        raise TypeError(
            f"moe.experts: {where!r} is a {type(part).__name__}, which does not follow the conventions of experts in "
            "transformers (use_experts_implementation). Write zerofn.moe.layer in your own model."
        )
    number, size = held.num_experts, axis.size
    if number % size:
        raise ValueError(
            f"moe.experts: {where!r} has {number} experts, which {size} ranks along {axis.name!r} cannot divide "
            f"equally. Use a multiple of {size} experts, or another size of the axis."
        )
    found: dict[str, Cut | tuple[Cut, ...]] = {}
    for last, x in part.named_parameters():
        name = f"{where}.{last}"
        word = words.get(name)
        if word is None or (word == _CUT and (not x.dim() or x.shape[0] != number)):
            raise ValueError(
                f"moe.experts: {name!r} has shape {list(x.shape)} in a module of {number} experts, and the plan "
                f"{f'has {word!r} for it' if word else 'has no entry for it'}. Write {_CUT!r} if it has one row for "
                f"each expert, and {_WHOLE!r} if all experts share it."
            )
        if word == _CUT:
            found[name] = _cut(name, equal(EXPERT, 0, number, size), over)
    held.num_experts, held._is_expert_parallel = number // size, size > 1
    shared = _Shared(over.forward if over else part.forward, axis, number, capacity)
    held.forward = replace(over, forward=shared) if over else shared
    return found


def _cut(name: str, mine: Cut, over: CutExperts | None) -> Cut | tuple[Cut, ...]:
    """Return the cuts of a parameter: over the experts, and within each as tensor parallelism has it."""
    within = over.cuts.get(name) if over else None
    if within is None:
        return mine
    if within.dim == 0:
        raise ValueError(
            f"moe.experts: {name!r} would be cut along dim 0 over both {EXPERT!r} and {within.axis!r}. Leave it out of "
            "the plan of zerofn.parallel.tensor."
        )
    return mine, within


@dataclass(frozen=True)
class _Shared:
    """The forward of a module of experts that ranks share. `forward`: of those that are here. `number`: of all."""

    forward: Forward
    axis: Axis
    number: int
    capacity: float | None

    def __call__(self, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        """Send tokens [S, d] to their experts `index` int64 [S, k]; return the sum by `weights` [S, k] of what comes
        back, [S, d].
        """
        counts = _counted.get()
        if self.capacity is not None:
            return self._in_places(hidden, index, weights, counts)
        if counts is not None:
            counts.append(torch.zeros((), dtype=torch.int64, device=hidden.device))
        return self.forward(hidden, index, weights) if self.axis.size == 1 else self._of_all(hidden, index, weights)

    def _of_all(self, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        """Compute with the tokens of all ranks what the experts that are here add to them."""
        here = self.number // self.axis.size
        first = self.axis.rank * here
        tokens, chosen, by = (all_gather(x, self.axis) for x in (hidden, index, weights))
        elsewhere = (chosen < first) | (chosen >= first + here)
        # The number behind the last expert is that of none, for transformers.
        local = torch.where(elsewhere, here, chosen - first)
        return reduce_scatter(self.forward(tokens, local, by.masked_fill(elsewhere, 0.0)), self.axis)

    def _in_places(self, hidden: Tensor, index: Tensor, weights: Tensor, counts: list[Tensor] | None) -> Tensor:
        """Send each expert as many tokens as it has places, and add up what comes back here."""
        num_tokens, k = index.shape
        places = places_of(num_tokens, self.number, k, self.capacity, 1)
        order = order_of("probability", weights.detach().t())
        found = placed(index.t(), weights.t(), self.number, places, order)
        if counts is not None:
            counts.append(found.dropped)
        axis = self.axis if self.axis.size > 1 else None
        rows = dispatch(hidden, found, axis)
        flat = rows.flatten(0, 1)
        local = torch.arange(rows.shape[0], device=flat.device).repeat_interleave(rows.shape[1]).unsqueeze(-1)
        y = self.forward(flat, local, torch.ones_like(local, dtype=weights.dtype))
        return combine(y.view(*rows.shape[:2], -1), found, axis)
