"""DeepSpeed's optimizers, by the names of its configuration, as transformations of `zerofn.optim`."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch

import zerofn

from .. import optim
from .deepspeed_file import Section, is_number, shown
from .deepspeed_schedules import schedule_of

_IGNORED = ("torch_adam", "fp32_optimizer_states", "foreach", "fused", "set_grad_none")  # how, not what
_REFUSED = {
    **dict.fromkeys(("MuAdam", "MuAdamW", "MuSGD"), "pass muP's factors to optim.adamw(lr_scale=)"),
    "Muon": "it has two learning rates, for matrices and for other leaves; write tx=optim.muon(...) yourself",
    "Lamb": "it clamps the trust ratio, which optax does not; write tx=optim.lamb(...) yourself",
}


def optimizer_of(config: Section, moments: Any, mask: Any = None) -> tuple[Any, Any]:
    """Return (transformation, learning rate) that `optimizer`, `scheduler` and `gradient_clipping` say.

    `moments`: their format. `mask`: which leaves decay. Raises `ValueError` for an optimizer or a parameter that has no
    counterpart.
    """
    block = config("optimizer")
    if block.values.get("type") is None:
        raise ValueError(
            "from_deepspeed: the configuration has no optimizer. Add one, or pass your own: "
            "from_deepspeed(config, tx=optim.adamw(3e-4))."
        )
    name = block.text("type") or ""
    kinds = {x.lower(): x for x in (*_OPTIMIZERS, *_REFUSED)}  # DeepSpeed takes any case of these
    kind = kinds.get(name.lower())
    if kind is None:
        raise ValueError(
            f"from_deepspeed: optimizer.type: {name!r} has no counterpart; the known types are "
            f"{', '.join(_OPTIMIZERS)}. For another optimizer, pass tx=."
        )
    if kind in _REFUSED:
        raise ValueError(f"from_deepspeed: optimizer.type {name!r}: {_REFUSED[kind]}.")
    params = block("params")
    default, make = _OPTIMIZERS[kind]
    rate = schedule_of(config("scheduler"), params.number("lr", default, 0.0))
    tx = make(params, rate, moments, mask)
    _warn_of_no_codes(name, tx, config("scheduler")("params").values.get("total_num_steps"))
    return tx, rate


def _warn_of_no_codes(name: str, tx: Any, total: Any) -> None:
    """Warn of an optimizer that would send gradients as they are in every step of a schedule of `total` steps."""
    first = tx.about.phase and tx.about.phase(0)  # steps of one kind, and how many there are
    if first and first.left is not None and is_number(total) and first.left >= total:
        warnings.warn(
            f"from_deepspeed: optimizer.type {name!r} sends signs from step {first.left:,} on, but the scheduler's "
            f"total_num_steps is {total:,}, so all steps would send uncompressed gradients. Write a freeze_step of 15 "
            "to 25 % of all steps.",
            stacklevel=2,
        )


def clipped(tx: Any, norm: float) -> Any:
    """Return a transformation behind one that clips gradients to a global norm; 0 is none."""
    return optim.chain(optim.clip_by_global_norm(norm), tx) if norm else tx


def _betas(params: Section, default: tuple[float, float]) -> tuple[float, float]:
    value = params.values.get("betas", default)
    if not (isinstance(value, list | tuple) and len(value) == 2 and all(is_number(x) and 0 <= x < 1 for x in value)):
        raise ValueError(f"from_deepspeed: {params.name}.betas: expected two numbers from 0 to 1, got {shown(value)}.")
    return float(value[0]), float(value[1])


def _must_be(params: Section, name: str, wanted: Any, why: str) -> None:
    if params.values.get(name, wanted) != wanted:
        raise ValueError(f"from_deepspeed: {params.name}.{name}={params.values[name]!r}: {why}.")


def _adam(decoupled: bool) -> Callable[[Section, Any, Any, Any], Any]:
    def make(params: Section, rate: Any, moments: Any, mask: Any) -> Any:
        params.only("lr", "betas", "eps", "weight_decay", "amsgrad", "bias_correction", "adam_w_mode", *_IGNORED)
        _must_be(params, "amsgrad", False, "amsgrad has no counterpart")
        _must_be(params, "bias_correction", True, "here the bias of moments is always corrected")
        b1, b2 = _betas(params, (0.9, 0.999))
        eps, decay = params.number("eps", 1e-8, 0.0), params.number("weight_decay", 0.0, 0.0)
        if decoupled or params.flag("adam_w_mode", True):  # DeepSpeed's "Adam" is AdamW unless it is told otherwise
            return optim.adamw(rate, b1, b2, eps, decay, mask, moments=moments)
        adam = optim.adam(rate, b1, b2, eps, moments=moments)
        return optim.chain(optim.add_decayed_weights(decay, mask), adam) if decay else adam

    return make


_ONE_BIT = ("amsgrad", "bias_correction", "eps_inside_sqrt", "max_grad_norm", "cuda_aware", "comm_backend_name")


def _one_bit(params: Section, default: float, *names: str) -> tuple[tuple[float, float, float, float], int]:
    """Return (b1, b2, eps and weight decay, the step at which codes begin, or variance ends)."""
    params.only("lr", "betas", "eps", "weight_decay", *_ONE_BIT, *names)
    _must_be(params, "amsgrad", False, "amsgrad has no counterpart")
    _must_be(params, "eps_inside_sqrt", False, "here eps is outside the square root")
    _must_be(params, "max_grad_norm", 0.0, "write it as gradient_clipping")
    b1, b2 = _betas(params, (0.9, 0.999))
    how = (b1, b2, params.number("eps", 1e-8, 0.0), params.number("weight_decay", 0.0, 0.0))
    return how, params.number(names[0], default, 1, whole=True)


def _onebit_adam(params: Section, rate: Any, moments: Any, mask: Any) -> Any:
    _plain_moments("OneBitAdam", moments)
    how, freeze_step = _one_bit(params, 100_000, "freeze_step")
    return optim.onebit_adam(rate, *how, mask, freeze_step=freeze_step)


def _zero_one_adam(params: Section, rate: Any, moments: Any, mask: Any) -> Any:
    _plain_moments("ZeroOneAdam", moments)
    local = ("local_step_scaler", "local_step_clipper")
    how, freeze_step = _one_bit(params, 100_000, "var_freeze_step", "var_update_scaler", *local)
    for name in local:
        if name in params.values:
            warnings.warn(
                f"from_deepspeed: {params.name}.{name} has no counterpart: here ranks send signs in every step. Leave "
                "it out. For replicas that train alone for some steps, see zerofn.diloco.",
                stacklevel=2,
            )
    scaler = params.number("var_update_scaler", 16, 1, whole=True)
    return optim.zero_one_adam(rate, *how, mask, var_freeze_step=freeze_step, var_update_scaler=scaler)


_OF_LAMB = {
    "min_coeff": 0.01,
    "max_coeff": 10.0,
    "coeff_beta": 0.9,
    "factor_min": 0.5,
    "factor_max": 4.0,
    "factor_threshold": 0.1,
}


def _onebit_lamb(params: Section, rate: Any, moments: Any, mask: Any) -> Any:
    _plain_moments("OneBitLamb", moments)
    how, freeze_step = _one_bit(params, 100_000, "freeze_step", *_OF_LAMB)
    more = {name: params.number(name, default, 0.0) for name, default in _OF_LAMB.items()}
    return optim.onebit_lamb(rate, *how, mask, freeze_step=freeze_step, **more)


def _lion(params: Section, rate: Any, moments: Any, mask: Any) -> Any:
    params.only("lr", "betas", "weight_decay", *_IGNORED)
    b1, b2 = _betas(params, (0.9, 0.99))
    return optim.lion(rate, b1, b2, params.number("weight_decay", 0.0, 0.0), mask, moments=moments)


def _sgd(params: Section, rate: Any, moments: Any, mask: Any) -> Any:
    params.only("lr", "momentum", "nesterov", "weight_decay", "dampening", "maximize", *_IGNORED)
    _must_be(params, "dampening", 0, "dampening has no counterpart")
    _must_be(params, "maximize", False, "return the negative loss instead")
    momentum = params.number("momentum", 0.0, 0.0)
    decay, nesterov = params.number("weight_decay", 0.0, 0.0), params.flag("nesterov")
    return optim.sgd(rate, momentum or None, nesterov, decay, mask, moments=moments if momentum else None)


def _rmsprop(params: Section, rate: Any, moments: Any, mask: Any) -> Any:
    params.only("lr", "alpha", "eps", "weight_decay", "momentum", "centered", "maximize", *_IGNORED)
    _must_be(params, "maximize", False, "return the negative loss instead")
    _plain_moments("RMSprop", moments)
    decay, momentum = params.number("weight_decay", 0.0, 0.0), params.number("momentum", 0.0, 0.0)
    tx = optim.rmsprop(
        rate,
        params.number("alpha", 0.99, 0.0),
        params.number("eps", 1e-8, 0.0),
        eps_in_sqrt=False,
        centered=params.flag("centered"),
        momentum=momentum or None,
    )
    return optim.chain(optim.add_decayed_weights(decay, mask), tx) if decay else tx


def _adagrad(params: Section, rate: Any, moments: Any, mask: Any) -> Any:
    params.only("lr", "eps", "weight_decay", "lr_decay", "initial_accumulator_value", "maximize", *_IGNORED)
    _must_be(params, "lr_decay", 0, "write a schedule")
    _must_be(params, "maximize", False, "return the negative loss instead")
    _plain_moments("Adagrad", moments)
    eps, start = params.number("eps", 1e-10, 0.0), params.number("initial_accumulator_value", 0.0, 0.0)
    decay = params.number("weight_decay", 0.0, 0.0)

    def init(given: Any) -> Any:
        return zerofn.tree_map(lambda p: torch.full_like(p, start), given)

    def update(grads: Any, state: Any, given: Any) -> tuple[Any, Any]:
        state = zerofn.tree_map(lambda s, g: s + g * g, state, grads)
        return zerofn.tree_map(lambda g, s: g / (s.sqrt() + eps), grads, state), state

    # torch's formula: optax's adagrad has eps inside the root
    parts = [optim.from_functions(init, update, "adagrad"), optim.scale_by_learning_rate(rate)]
    return optim.chain(*([optim.add_decayed_weights(decay, mask)] if decay else []), *parts)


def _plain_moments(name: str, moments: str | None) -> None:
    if moments is not None:
        raise ValueError(f"from_deepspeed: bf16.bf16_optimizer_states has no effect on {name}, whose state is float32.")


# name -> (DeepSpeed's learning rate, what makes it)
_OPTIMIZERS: dict[str, tuple[float, Callable[[Section, Any, Any, Any], Any]]] = {
    "Adam": (1e-3, _adam(decoupled=False)),
    "AdamW": (1e-3, _adam(decoupled=True)),
    "Lion": (1e-4, _lion),
    "Adagrad": (1e-2, _adagrad),
    "SGD": (1e-3, _sgd),
    "RMSprop": (1e-2, _rmsprop),
    "OneBitAdam": (1e-3, _onebit_adam),
    "ZeroOneAdam": (1e-3, _zero_one_adam),
    "OneBitLamb": (1e-3, _onebit_lamb),
}
