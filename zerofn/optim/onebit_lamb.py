"""1-bit LAMB: LAMB whose momentum is sent as signs, once its variance has settled."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import tree
from ..sharded_math.reductions import largest, norms
from ..sharding.coded_sums import staggered
from ..sharding.sharded import is_sharded
from . import checks
from .base import (
    About,
    Fused,
    GradientTransformation,
    Mask,
    ScalarOrSchedule,
    masks_of,
    rate_at,
    scaled,
    unless_skipped,
)
from .fused import LeafConstants
from .onebit import (
    OneBitRule,
    OneBitState,
    Place,
    check_gradients,
    initial,
    next_momentum,
    phase_at,
    plain_momentum,
    put_back,
    units_of,
)
from .phases import EXACT
from .scale_by_adam import AdamState, averaged_squares, check_moments, corrected, next_moments
from .torch_optimizers import told
from .trust_ratio import scale_leaves


@dataclass(frozen=True, kw_only=True)
class OneBitLambState(OneBitState):
    """The state of `onebit_lamb`: the fields of `OneBitState`, and three more.

    `fresh_nu`: the average of squares of gradients that are reconstructed from the momentum, also updated after the
    freeze step. `coefficients` [leaves]: for each leaf the average of LAMB's ratio of norms until the freeze step.
    `ratios` [leaves]: the last factors of these coefficients.

    >>> state = onebit_lamb(1e-3, freeze_step=1000).init({"b": torch.zeros(2), "w": torch.zeros(2)})
    >>> state.phase, state.coefficients
    ('exact', tensor([0., 0.]))
    """

    fresh_nu: Any
    coefficients: Tensor
    ratios: Tensor


tree.register_dataclass(OneBitLambState, static=("phase",))


class _How(NamedTuple):
    """The hyperparameters of `onebit_lamb`, by its names."""

    learning_rate: ScalarOrSchedule
    b1: float
    b2: float
    eps: float
    min_coeff: float
    max_coeff: float
    coeff_beta: float
    factor_min: float
    factor_max: float
    factor_threshold: float


@told
def onebit_lamb(
    learning_rate: ScalarOrSchedule,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    mask: Mask | None = None,
    *,
    freeze_step: int,
    min_coeff: float = 0.01,
    max_coeff: float = 10.0,
    coeff_beta: float = 0.9,
    factor_min: float = 0.5,
    factor_max: float = 4.0,
    factor_threshold: float = 0.1,
) -> GradientTransformation:
    """1-bit LAMB (Li et al. 2021, arXiv:2104.06069, Algorithm 1).

    Until update `freeze_step` it is LAMB: each leaf's update u = m' / (sqrt(v') + eps) + weight_decay * p is multiplied
    by |p| / |u|, clamped to [`min_coeff`, `max_coeff`], and the state averages these coefficients with decay
    `coeff_beta`. After it, ranks send signs as in `onebit_adam`, v is constant, and the leaf's coefficient is its
    average times a factor: the largest ratio of the constant denominator to a denominator from gradients that are
    reconstructed from the momentum. The factor is clamped to [`factor_min`, `factor_max`], and changes in one step by
    at most the fraction `factor_threshold`. All averages are bias-corrected.

    Unlike the paper, momenta of leaves are not scaled before they are sent: each 2,048 elements have their own scale.
    State, memory, bytes and rules for a chain are those of `onebit_adam`, plus 4 bytes for each parameter, sharded like
    v. `mask(leaf) -> bool`: whether a leaf decays; by default all do. Raises `ValueError` for hyperparameters out of
    range.

    >>> from zerofn import optim
    >>> tx = optim.onebit_lamb(1e-3, freeze_step=1000)
    """
    name = "onebit_lamb"
    checks.learning_rate(name, learning_rate)
    check_moments(name, b1, b2, eps)
    checks.mask(name, mask)
    checks.count(name, 1, freeze_step=freeze_step)
    checks.number(name, 0.0, weight_decay=weight_decay, min_coeff=min_coeff, factor_min=factor_min)
    checks.number(name, 0.0, above=True, max_coeff=max_coeff, factor_max=factor_max)
    checks.number(name, 0.0, below=1.0, coeff_beta=coeff_beta, factor_threshold=factor_threshold)
    checks.interval(name, ("min_coeff", min_coeff), ("max_coeff", max_coeff))
    checks.interval(name, ("factor_min", factor_min), ("factor_max", factor_max))
    how = _How(learning_rate, b1, b2, eps, min_coeff, max_coeff, coeff_beta, factor_min, factor_max, factor_threshold)
    rule = _Rule(name, how, LeafConstants(weight_decay, mask, None))
    label = rule.constants.both if mask else None
    rate = lambda state: rate_at(learning_rate, state.count)  # noqa: E731
    args = (*how[:4], weight_decay, mask, freeze_step, *how[4:])  # in the order of the function's
    about = About(name, args, label, rate, phase_at(freeze_step))
    return GradientTransformation(rule.init, rule.update, about, masks_of(name, mask), Fused(rule.apply))


class _Rule(OneBitRule):
    """The steps of both kinds."""

    def __init__(self, name: str, how: _How, constants: LeafConstants) -> None:
        super().__init__(name)
        self._how, self.constants = how, constants

    def init(self, params: Any) -> OneBitLambState:
        """Return the state before the first update."""
        found = initial(params)
        nodes = tree.leaves(params, is_leaf=is_sharded)
        num = sum(len(x.layout.leaves) if is_sharded(x) else 1 for x in nodes)
        zeros = torch.zeros(num, device=found.count.device)
        fresh_nu = tree.tree_map(torch.zeros_like, found.nu)
        return OneBitLambState(**vars(found), fresh_nu=fresh_nu, coefficients=zeros, ratios=torch.ones_like(zeros))

    def apply(
        self, grads: Any, state: OneBitLambState, params: Any, factor: Tensor | None, finite: Tensor | None
    ) -> tuple[Any, OneBitLambState]:
        """Take a step, with the semantics of `Apply`."""
        step = self._exact if state.phase == EXACT else self._coded
        new, fresh = step(scaled(grads, factor), state, params)
        return unless_skipped(finite, new, params), unless_skipped(finite, fresh, state)

    def _exact(self, grads: Any, state: OneBitLambState, params: Any) -> tuple[Any, OneBitLambState]:
        how = self._how
        adam = next_moments(grads, AdamState(state.count, state.mu, state.nu), how.b1, how.b2)
        direction = tree.tree_map(
            lambda m, v: m / (v.sqrt() + how.eps),
            corrected(adam.mu, how.b1, adam.count),
            corrected(adam.nu, how.b2, adam.count),
        )
        u = self._decayed(direction, params)
        names, both = norms((params, u))
        p, n = both.chunk(2)
        ratios = torch.where((p == 0) | (n == 0), 1.0, (p / n).clamp(how.min_coeff, how.max_coeff))
        coefficients = how.coeff_beta * state.coefficients + (1 - how.coeff_beta) * ratios
        fresh = replace(
            state,
            count=adam.count,
            nu_count=adam.count.clone(),
            mu=adam.mu,
            nu=adam.nu,
            fresh_nu=tree.tree_map(torch.clone, adam.nu),
            coefficients=coefficients.to(state.coefficients.dtype),
        )
        return self._stepped(params, u, names, ratios, state.count), fresh

    def _coded(self, grads: Any, state: OneBitLambState, params: Any) -> tuple[Any, OneBitLambState]:
        how = self._how
        check_gradients(self._name, params, grads)
        moved = self._moved(grads, state)
        implied = tree.tree_map(lambda new, old: (new - how.b1 * old) / (1 - how.b1), moved.mu, state.mu)
        moved = replace(moved, fresh_nu=averaged_squares(state.fresh_nu, implied, how.b2))
        frozen = tree.tree_map(lambda v: v.sqrt() + how.eps, corrected(state.nu, how.b2, state.nu_count))
        now = tree.tree_map(lambda v: v.sqrt() + how.eps, corrected(moved.fresh_nu, how.b2, moved.count))
        settled = lambda x, v: torch.where(v > 0, x, 0.0)  # noqa: E731
        _, ratios = largest(tree.tree_map(lambda a, b, v: settled(a / b, v), frozen, now, state.nu))
        momentum = corrected(moved.mu, how.b1, moved.count)
        direction = tree.tree_map(lambda m, d, v: settled(m / d, v), momentum, frozen, state.nu)
        u = self._decayed(direction, params)
        names, both = norms((direction, u))
        part, whole = both.chunk(2)
        share = torch.where(whole > 0, (part / whole).clamp(max=1.0), 1.0)  # decay has no denominator
        ratios = (ratios * share + (1 - share)).clamp(how.factor_min, how.factor_max)
        near = state.ratios * (1 - how.factor_threshold), state.ratios * (1 + how.factor_threshold)
        ratios = torch.maximum(torch.minimum(ratios, near[1]), near[0])
        coefficients = state.coefficients / (1 - how.coeff_beta ** state.nu_count.double())
        new = self._stepped(params, u, names, (ratios * coefficients).to(ratios.dtype), state.count)
        return new, replace(moved, ratios=ratios.to(state.ratios.dtype))

    def _decayed(self, direction: Any, params: Any) -> Any:
        decays = self.constants.over(params)[0]
        return tree.tree_map(lambda d, p, decay: d + decay * p, direction, params, decays)

    def _stepped(self, params: Any, u: Any, names: list[str], factors: Tensor, count: Tensor) -> Any:
        """Return the parameters after a step. `names`: of leaves, of which the first half are those of `factors`."""
        rate = rate_at(self._how.learning_rate, count)
        updates = scale_leaves(u, {name: k for k, name in enumerate(names[: len(names) // 2])}, factors)
        return tree.tree_map(lambda p, x: (p - rate * x).to(p.dtype), params, updates)

    def _moved(self, grads: Any, state: OneBitLambState) -> OneBitLambState:
        """Return the state with the next momentum."""
        trees, b1 = (state.mu, grads, state.worker_error, state.server_error), self._how.b1
        found = staggered([_unit(place, b1, *columns) for place, columns in units_of(*trees)])
        mu, worker, server = put_back((state.mu, state.worker_error, state.server_error), found)
        return replace(state, count=state.count + 1, mu=mu, worker_error=worker, server_error=server)


def _unit(
    place: Place | None, b1: float, m: Tensor, g: Tensor, worker: Tensor, server: Tensor
) -> Generator[None, None, list[Tensor]]:
    """Return the next momentum and errors of a unit."""
    if place is None:
        return [plain_momentum(b1, m, g), worker, server]
    found = yield from next_momentum(place, b1, m, g, worker, server)
    return [found.values(m.numel()).to(m.dtype), found.worker, found.server]
