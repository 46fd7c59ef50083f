"""1-bit Adam: Adam whose momentum is sent as signs, once its variance has settled."""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..ops import frozen_adamw as _op  # noqa: F401  (defines zerofn::frozen_adamw)
from ..sharding.coded_sums import staggered
from . import checks
from .adamw import adamw, check_adamw
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
from .fused import LeafConstants, LeafScale
from .leaf_runs import TensorRuns, slots
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
from .phases import EXACT, Phase
from .scale_by_adam import AdamState
from .torch_optimizers import told


@told
def onebit_adam(
    learning_rate: ScalarOrSchedule,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    mask: Mask | None = None,
    lr_scale: LeafScale | None = None,
    *,
    freeze_step: int,
) -> GradientTransformation:
    """1-bit Adam (Tang et al. 2021, arXiv:2102.02888, Algorithm 1): `adamw` until update `freeze_step`; after it, ranks
    send one bit for each element.

    Until `freeze_step` it is `optim.adamw`, bit for bit, and gradients are averaged over ranks as usual. After it, v is
    constant, and each rank sends the signs of its part of the momentum, b1 / ranks * m + (1 - b1) * g / ranks, with one
    scale per 2,048 elements: 1/31.75 of float32's bytes. The rank adds the error of the signs to the values that it
    sends next, and the owner of each shard does the same with the sum. Steps are p -= learning_rate * (m' / (sqrt(v') +
    eps) + weight_decay * p), where m' and v' are bias-corrected, v' by the number of its updates. An element that had
    no gradient until `freeze_step` has v = 0, and only weight decay changes it. In the first step with signs, m is also
    rounded to signs, and later steps add its error; in the paper, m is exact in this step.

    In addition to m and v, the state needs for each parameter 4 bytes on every rank and at every stage, for the errors
    of this rank's signs, and 4 / ranks bytes for the errors of the sums' signs. At stages 1 to 3, m and v are sharded,
    and parameters are gathered as usual (see `zerofn.Wire`); every stage gives the bits of stage 0. With one rank, and
    for plain parameters, nothing is sent or rounded.

    Gradients must come from `state.value_and_grad`, which does not average them over ranks after `freeze_step`. In a
    `chain`, only transformations that multiply all gradients by one number may come before it: `clip_by_global_norm`
    then clips by the root mean square of the ranks' norms, since the norm of the mean gradient is not known. `mask`,
    `lr_scale`: as in `adamw`. Raises `ValueError` for hyperparameters out of range.

    >>> from zerofn import optim
    >>> optim.onebit_adam(1e-3, freeze_step=1000)
    onebit_adam(learning_rate=0.001, b1=0.9, b2=0.999, eps=1e-08, weight_decay=0.0, freeze_step=1000)
    """
    checks.count("onebit_adam", 1, freeze_step=freeze_step)
    how = (learning_rate, b1, b2, eps, weight_decay, mask, lr_scale)
    return adam_of_signs("onebit_adam", how, (freeze_step,), phase_at(freeze_step), warms_up=True)


def adam_of_signs(
    name: str, how: tuple[Any, ...], more: tuple[Any, ...], phase: Callable[[int], Phase], *, warms_up: bool
) -> GradientTransformation:
    """Return AdamW whose momentum is sent as signs in some steps. `how`: the arguments of `adamw`; `more`: others of
    `name`. `phase`: the kind of step after a number of updates. `warms_up`: whether no exact step comes after another.
    """
    learning_rate, b1, b2, eps, weight_decay, mask, lr_scale = how
    check_adamw(name, *how)
    exact = adamw(*how)
    constants = LeafConstants(weight_decay, mask, lr_scale)
    rule = _Rule(name, learning_rate, (b1, b2, eps), constants, exact, warms_up)
    about = About(name, (*how, *more), exact.about.label, exact.about.learning_rate, phase)
    return GradientTransformation(initial, rule.update, about, masks_of(name, mask), Fused(rule.apply, by_runs=True))


class _Rule(OneBitRule):
    """The steps of both kinds. `averages`: b1, b2 and eps. `exact`: `adamw` with the same hyperparameters."""

    def __init__(
        self,
        name: str,
        rate: ScalarOrSchedule,
        averages: tuple[float, float, float],
        constants: LeafConstants,
        exact: GradientTransformation,
        warms_up: bool,
    ) -> None:
        super().__init__(name)
        self._rate, self._constants, self._exact, self._warms_up = rate, constants, exact, warms_up
        self._b1, self._b2, self._eps = averages

    def apply(
        self, grads: Any, state: OneBitState, params: Any, factor: Tensor | None, finite: Tensor | None
    ) -> tuple[Any, OneBitState]:
        """Take a step, with the semantics of `Apply`."""
        exact, one = state.phase == EXACT, 1 if finite is None else finite
        if exact and self._warms_up:  # then all updates so far were of this kind
            assert self._exact.fused is not None and self._exact.fused.apply is not None
            before = AdamState(state.count, state.mu, state.nu)
            params, after = self._exact.fused.apply(grads, before, params, factor, finite)
            return params, replace(state, count=after.count, nu_count=after.count, mu=after.mu, nu=after.nu)
        if not exact:
            check_gradients(self._name, params, grads)
        nu_count = state.nu_count + one if exact else state.nu_count
        errors = (state.worker_error, state.server_error)
        trees = (params, state.mu, state.nu, scaled(grads, factor), *errors)
        units = zip(units_of(*trees), slots(params, self._constants.both), strict=True)
        now = self._now(state, exact, nu_count, finite)
        found = staggered([self._unit(None if exact else place, x, runs, now) for (place, x), runs in units])
        params, mu, nu, worker, server = put_back((params, state.mu, state.nu, *errors), found)
        return params, OneBitState(state.count + one, nu_count, mu, nu, worker, server, state.phase)

    def _now(self, state: OneBitState, exact: bool, nu_count: Tensor, finite: Tensor | None) -> _Now:
        rate = rate_at(self._rate, state.count)
        lr, base = (rate, 1.0) if isinstance(rate, Tensor) else (None, float(rate))
        return _Now(exact, lr, base, 1 / (1 - self._b1 ** (state.count + 1).double()), nu_count, finite)

    def _unit(
        self, place: Place | None, columns: tuple[Any, ...], runs: TensorRuns, now: _Now
    ) -> Generator[None, None, list[Tensor]]:
        """Return the next parameters, averages and errors of a unit."""
        p, m, v, g, worker, server = columns
        if now.exact:
            v = unless_skipped(now.finite, (v + (1 - self._b2) * (g.to(v.dtype).square() - v)).to(v.dtype), v)
        starts, stops, constants = runs.columns
        rates, decays = [now.base * scale for _, scale in constants], [decay for decay, _ in constants]
        how = (now.nu_count, now.lr, now.corrects, now.finite, starts, stops, rates, decays, self._b2, self._eps)
        if place is None:
            p, m = torch.ops.zerofn.frozen_adamw(p, m, v, plain_momentum(self._b1, m, g), *how)
            return [p, m, v, worker, server]
        found = yield from next_momentum(place, self._b1, m, g, worker, server, now.finite)
        p, m = torch.ops.zerofn.frozen_adamw(p, m, v, found.rows, *how, found.row, found.block, found.gaps)
        return [p, m, v, found.worker, found.server]


class _Now(NamedTuple):
    """What all units of a step have in common. `exact`: gradients are sums already, and the variance is updated. The
    learning rate is `base`, times `lr`. `corrects`: what first moments are multiplied by. `nu_count`: updates of v.
    """

    exact: bool
    lr: Tensor | None
    base: float
    corrects: Tensor
    nu_count: Tensor
    finite: Tensor | None
