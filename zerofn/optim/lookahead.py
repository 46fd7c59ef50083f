"""Lookahead: slow weights that follow the fast weights of an optimizer."""

from __future__ import annotations

from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import tree
from ..util.arguments import checked
from . import checks
from .base import About, Fused, GradientTransformation, apply_updates, count_zero, rate_inside, step


class LookaheadState(NamedTuple):
    """The state of `lookahead`.

    `fast_state`: the state of the fast optimizer. `steps_since_sync`: int64 scalar. `slow`: the slow weights, in
    the parameters' structure and dtype.

    >>> from zerofn import optim
    >>> state = lookahead(optim.sgd(1.0), sync_period=6, slow_step_size=0.5).init({"w": torch.ones(2)})
    >>> state.steps_since_sync, state.slow
    (tensor(0), {'w': tensor([1., 1.])})
    """

    fast_state: Any
    steps_since_sync: Tensor
    slow: Any


@checked("sync_period", "reset_state")
def lookahead(
    fast_optimizer: GradientTransformation, sync_period: int, slow_step_size: float, reset_state: bool = False
) -> GradientTransformation:
    """Move slow weights towards those of `fast_optimizer` every `sync_period` steps (Zhang et al. 2019, Algorithm 1).

    Slow weights move `slow_step_size` of the way. Fast weights restart from there; with `reset_state` so does their
    optimizer's state. The parameters are the fast weights. Evaluate the slow ones:
    `zerofn.gather(state.opt_state.slow)`, or `state.replace(params=state.opt_state.slow)` if nothing is frozen.
    (optax has both in the parameters.) Do not put `lookahead` into a `chain`: it would not see what a later
    transformation changes. Raises `ValueError` unless `sync_period` is at least 1 and `slow_step_size` is in [0,
    1].

    >>> import zerofn
    >>> tx = lookahead(zerofn.optim.sgd(1.0), sync_period=1, slow_step_size=0.5)
    >>> params = {"w": torch.ones(2)}
    >>> tx.update({"w": torch.ones(2)}, tx.init(params), params)[0]  # half of sgd's way
    {'w': tensor([-0.5000, -0.5000])}
    """
    checks.transformation("lookahead", fast_optimizer)
    checks.number("lookahead", 1, sync_period=sync_period)
    checks.number("lookahead", 0.0, slow_step_size=slow_step_size)
    if slow_step_size > 1:
        raise ValueError(f"lookahead: slow_step_size must be at most 1, got {slow_step_size!r}.")

    def init(params: Any) -> LookaheadState:
        slow = tree.tree_map(torch.clone, params)
        return LookaheadState(fast_optimizer.init(params), count_zero(params), slow)

    def follow(fast: Any, fast_state: Any, state: LookaheadState, params: Any, count: Tensor) -> tuple[Any, Any]:
        """Return the parameters and the state, `count` steps after the last synchronization."""
        sync = count >= sync_period

        def nearer(s: Tensor, f: Tensor) -> Tensor:
            return torch.where(sync, s + slow_step_size * (f - s), s).to(s.dtype)

        slow = tree.tree_map(nearer, state.slow, fast)
        fast = tree.tree_map(lambda f, s: torch.where(sync, s, f).to(f.dtype), fast, slow)
        if reset_state:
            anew = fast_optimizer.init(params)
            fast_state = tree.tree_map(lambda a, x: torch.where(sync, a, x), anew, fast_state)
        return fast, LookaheadState(fast_state, torch.where(sync, 0, count), slow)

    def update(grads: Any, state: LookaheadState, params: Any) -> tuple[Any, LookaheadState]:
        updates, fast_state = fast_optimizer.update(grads, state.fast_state, params)
        fast = apply_updates(params, updates)
        moved, fresh = follow(fast, fast_state, state, params, state.steps_since_sync + 1)
        return tree.tree_map(lambda u, f, m: u + (m - f), updates, fast, moved), fresh

    def apply(
        grads: Any, state: LookaheadState, params: Any, factor: Tensor | None, finite: Tensor | None
    ) -> tuple[Any, LookaheadState]:
        fast, fast_state = step(fast_optimizer, grads, state.fast_state, params, factor, finite)
        # A step that is not applied does not count, so it synchronizes nothing either.
        count = state.steps_since_sync + (1 if finite is None else finite)
        return follow(fast, fast_state, state, params, count)

    args = (fast_optimizer, sync_period, slow_step_size, reset_state)
    rate = rate_inside(fast_optimizer, attrgetter("fast_state"))
    about = About("lookahead", args, fast_optimizer.about.label, rate)
    return GradientTransformation(init, update, about, fast_optimizer.masks, Fused(apply))
