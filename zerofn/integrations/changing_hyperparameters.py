"""torch's optimizers with betas, momentum and weight decay that change at every step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

import zerofn
from zerofn import optim

ScalarOrSchedule = float | optim.Schedule  # `inject_hyperparams` looks for this name
_NAMES = {
    "Adam": ("betas", "weight_decay"),
    "AdamW": ("betas", "weight_decay"),
    "SGD": ("momentum", "weight_decay"),
    "RMSprop": ("momentum", "weight_decay"),
}


def can_change(kind: str, option: str) -> bool:
    """Whether an option of torch's class `kind` may change while it trains, as learning rates always may."""
    return option in _NAMES.get(kind, ())


def values_of(group: Mapping[str, Any]) -> dict[str, float]:
    """Return what `changing` takes from a torch optimizer's group as hyperparameters."""
    first, second = group.get("betas", (group.get("momentum", 0.0), 0.0))
    values = {"first": first, "second": second, "decay": group.get("weight_decay", 0.0)}
    return {"learning_rate": float(group["lr"]), **{name: float(x) for name, x in values.items()}}


def changing(kind: str, options: Mapping[str, Any]) -> Callable[..., Any]:
    """Return `make(learning_rate, first, second, decay)`, for `inject_hyperparams`.

    `first`, `second`: the two betas, or momentum and nothing. Moments are those of `translated(kind, options, ...)`, of
    the same types. The arithmetic is torch's, without fused operations.
    """

    def make(
        learning_rate: ScalarOrSchedule, first: ScalarOrSchedule, second: ScalarOrSchedule, decay: ScalarOrSchedule
    ) -> Any:
        given = (learning_rate, first, second, decay)
        if kind in ("Adam", "AdamW"):
            decoupled = kind == "AdamW" or bool(options.get("decoupled_weight_decay"))
            return _adam(given, float(options["eps"]), decoupled)
        if kind == "SGD":
            return _sgd(given, bool(options.get("nesterov")))
        return _rmsprop(given, float(options["alpha"]), float(options["eps"]), bool(options.get("centered")))

    return make


def _at(count: Tensor, given: tuple[Any, ...]) -> list[Tensor]:
    return [torch.as_tensor(x(count) if callable(x) else x, dtype=torch.float64) for x in given]


def _with_decay(grads: Any, params: Any, decay: Any) -> Any:
    return zerofn.tree_map(lambda g, p: g.to(p.dtype) + decay * p, grads, params)


def _averaged(moments: Any, values: Any, beta: Any) -> Any:
    return zerofn.tree_map(lambda m, x: (m + (1 - beta) * (x.to(m.dtype) - m)).to(m.dtype), moments, values)


def _adam(given: tuple[Any, ...], eps: float, decoupled: bool) -> Any:
    def update(grads: Any, state: Any, params: Any) -> tuple[Any, Any]:
        rate, b1, b2, decay = _at(state.count, given)
        count = state.count + 1
        c1, c2 = 1 - b1 ** count.double(), 1 - b2 ** count.double()
        if not decoupled:
            grads = _with_decay(grads, params, decay)
        mu = _averaged(state.mu, grads, b1)
        nu = _averaged(state.nu, zerofn.tree_map(torch.square, grads), b2)

        def one(m: Tensor, v: Tensor, p: Tensor) -> Tensor:
            d = (m / c1) / ((v / c2).sqrt() + eps)
            return (-rate * (d + decay * p if decoupled else d)).to(p.dtype)

        return zerofn.tree_map(one, mu, nu, params), optim.AdamState(count, mu, nu)

    return optim.from_functions(optim.scale_by_adam().init, update, "adam")


def _sgd(given: tuple[Any, ...], nesterov: bool) -> Any:
    def init(params: Any) -> Any:
        return optim.sgd(1.0, 0.9).init(params)

    def update(grads: Any, state: Any, params: Any) -> tuple[Any, Any]:
        rate, momentum, _, decay = _at(state.count, given)
        d = _with_decay(grads, params, decay)
        trace = zerofn.tree_map(lambda m, d: (momentum * m + d).to(m.dtype), state.trace, d)
        d = zerofn.tree_map(lambda m, d: d + momentum * m, trace, d) if nesterov else trace
        return zerofn.tree_map(lambda d: (-rate * d).to(d.dtype), d), optim.SgdState(state.count + 1, trace)

    return optim.from_functions(init, update, "sgd")


def _rmsprop(given: tuple[Any, ...], alpha: float, eps: float, centered: bool) -> Any:
    rms = (optim.scale_by_stddev if centered else optim.scale_by_rms)(alpha, eps, eps_in_sqrt=False)

    def init(params: Any) -> Any:
        return rms.init(params), optim.trace(0.9).init(params)

    def update(grads: Any, state: Any, params: Any) -> tuple[Any, Any]:
        rate, momentum, _, decay = _at(torch.zeros(()), given)
        scaled, fresh = rms.update(_with_decay(grads, params, decay), state[0], params)
        trace = zerofn.tree_map(lambda m, d: (momentum * m + d).to(m.dtype), state[1].trace, scaled)
        return zerofn.tree_map(lambda m: (-rate * m).to(m.dtype), trace), (fresh, optim.TraceState(trace))

    return optim.from_functions(init, update, "rmsprop")
