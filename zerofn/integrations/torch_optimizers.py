"""torch's optimizers as transformations of `zerofn.optim`, by a table."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from .. import optim, tree_map

Mask = Callable[[Any], bool] | None
_IGNORED = {"foreach", "fused", "capturable", "differentiable"}  # how, not what


def translated(kind: type, options: Mapping[str, Any], rate: Any, mask: Mask = None) -> Any:
    """Return the transformation of a class of optimizers with these options.

    `rate`: the learning rate, a float or a schedule, in place of `lr`. `mask(leaf)`: which leaves `weight_decay` is
    for. Raises `ValueError` for a class or an option without a counterpart.
    """
    name = kind.__name__
    known = _KNOWN.get(name) if kind.__module__.startswith(("torch.optim.", "transformers.optimization")) else None
    if known is None:
        there = ", ".join(f"{x} ({', '.join(names)})" for x, (_, names) in _KNOWN.items())
        raise ValueError(
            f"optimizer {kind.__module__}.{name} has no counterpart in zerofn.optim. ZeroFn translates these "
            f"optimizers of torch.optim, and transformers' Adafactor: {there}."
        )
    make, names = known
    given = {k: v for k, v in options.items() if k not in _IGNORED and k != "lr"}
    if given.pop("decoupled_weight_decay", False) and name == "Adam":
        make = _adamw
    for key, value in given.items():
        if key not in names and value:  # what is 0, False or None is off
            raise ValueError(
                f"optimizer {name}: {key}={value!r} has no counterpart. Leave it out; the known arguments are "
                f"{', '.join(names)}."
            )
    given = {k: v for k, v in given.items() if k in names}
    return make(rate, mask, **given)


def _adamw(rate: Any, mask: Mask, betas: Any = (0.9, 0.999), eps: float = 1e-8, weight_decay: float = 1e-2) -> Any:
    decay = float(weight_decay)
    return optim.adamw(rate, float(betas[0]), float(betas[1]), float(eps), decay, mask if decay else None)


def _adam(rate: Any, mask: Mask, betas: Any = (0.9, 0.999), eps: float = 1e-8, weight_decay: float = 0.0) -> Any:
    return _with_l2(optim.adam(rate, float(betas[0]), float(betas[1]), float(eps)), weight_decay, mask)


def _sgd(rate: Any, mask: Mask, momentum: float = 0.0, nesterov: bool = False, weight_decay: float = 0.0) -> Any:
    decay = float(weight_decay)
    return optim.sgd(rate, momentum or None, nesterov, decay, mask if decay else None)


def _rmsprop(
    rate: Any,
    mask: Mask,
    alpha: float = 0.99,
    eps: float = 1e-8,
    momentum: float = 0.0,
    centered: bool = False,
    weight_decay: float = 0.0,
) -> Any:
    """torch's momentum sums directions without their learning rates; optax's, and `optim.rmsprop`'s, with them."""
    scaled = (optim.scale_by_stddev if centered else optim.scale_by_rms)(alpha, eps, eps_in_sqrt=False)
    traced = [optim.trace(momentum)] if momentum else []
    return _with_l2(optim.chain(scaled, *traced, optim.scale_by_learning_rate(rate)), weight_decay, mask)


def _adagrad(
    rate: Any, mask: Mask, initial_accumulator_value: float = 0.0, eps: float = 1e-10, weight_decay: float = 0.0
) -> Any:
    """torch adds eps to the root; optax, and `optim.adagrad`, add it below the root."""

    def init(params: Any) -> Any:
        return tree_map(lambda p: torch.full_like(p, initial_accumulator_value, dtype=torch.float32), params)

    def update(grads: Any, sums: Any, params: Any) -> tuple[Any, Any]:
        sums = tree_map(lambda s, g: s + g.float().square(), sums, grads)
        return tree_map(lambda g, s: (g / (s.sqrt() + eps)).to(g.dtype), grads, sums), sums

    own = optim.chain(optim.from_functions(init, update, "adagrad"), optim.scale_by_learning_rate(rate))
    return _with_l2(own, weight_decay, mask)


def _adafactor(
    rate: Any,
    mask: Mask,
    eps: Any = (1e-30, 1e-3),
    clip_threshold: float = 1.0,
    decay_rate: float = -0.8,
    weight_decay: float = 0.0,
    scale_parameter: bool = True,
    relative_step: bool = True,
) -> Any:
    """transformers', with the rates that its Trainer gives it. (torch's own class of this name has other options.)"""
    if scale_parameter or relative_step:
        raise ValueError("optimizer Adafactor: scale_parameter and relative_step must be False.")
    decayed = [optim.add_decayed_weights(weight_decay, mask)] if weight_decay else []
    return optim.chain(
        optim.scale_by_factored_rms(True, -decay_rate, 0, 1, float(eps[0])),
        optim.clip_by_block_rms(clip_threshold),
        *decayed,
        optim.scale_by_learning_rate(rate),
    )


def _with_l2(tx: Any, decay: float, mask: Mask) -> Any:
    return optim.chain(optim.add_decayed_weights(decay, mask), tx) if decay else tx


# class -> (what makes it, its options)
_KNOWN: dict[str, tuple[Callable[..., Any], tuple[str, ...]]] = {
    "AdamW": (_adamw, ("betas", "eps", "weight_decay")),
    "Adam": (_adam, ("betas", "eps", "weight_decay")),
    "SGD": (_sgd, ("momentum", "nesterov", "weight_decay")),
    "Adagrad": (_adagrad, ("initial_accumulator_value", "eps", "weight_decay")),
    "Adafactor": (
        _adafactor,
        ("eps", "clip_threshold", "decay_rate", "weight_decay", "scale_parameter", "relative_step"),
    ),
    "RMSprop": (_rmsprop, ("alpha", "eps", "momentum", "centered", "weight_decay")),
}
