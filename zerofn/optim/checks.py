"""Checks of hyperparameters, before anything is traced or allocated.

`where` is the name of the public function, with which every message begins.
"""

from __future__ import annotations

import inspect
import math
import numbers
from collections.abc import Sequence
from typing import Any

from . import torch_optimizers
from .base import GradientTransformation


def number(
    where: str, low: float | None = None, *, above: bool = False, below: float | None = None, **values: Any
) -> None:
    """Raise `TypeError` unless all `values` are numbers, `ValueError` unless they are in range and not NaN.

    A value must be at least `low` (more than `low`, if `above`), and less than `below`.
    """
    for name, value in values.items():
        if not _is_number(value):
            raise TypeError(f"{where}: {name} must be a number, got {value!r}.")
        if low is not None and below is not None:
            if not low <= value < below:
                raise ValueError(f"{where}: {name} must lie in [{low:g}, {below:g}), got {value!r}.")
        elif low is not None and not (value > low if above else value >= low):
            kind = "positive" if above and low == 0 else f"at least {low:g}" if low else "zero or more"
            raise ValueError(f"{where}: {name} must be {kind}, got {value!r}.")
        elif value != value:
            raise ValueError(f"{where}: {name} must be a number, got {value!r}.")


def count(where: str, low: int, **values: Any) -> None:
    """Raise `TypeError` unless all `values` are numbers, `ValueError` unless they are whole and at least `low`."""
    number(where, low, **values)
    for name, value in values.items():
        if not float(value).is_integer():
            instead = int(value) if math.isfinite(value) else "a whole number"
            raise ValueError(f"{where}: {name} must be a number of updates, got {value!r}. Write {instead}.")


def interval(where: str, low: tuple[str, float], high: tuple[str, float]) -> None:
    """Raise `ValueError` unless the first bound, a name and a value, is at most the second."""
    if low[1] > high[1]:
        raise ValueError(f"{where}: {low[0]}={low[1]} must not be larger than {high[0]}={high[1]}.")


def learning_rate(where: str, value: Any) -> None:
    """Raise unless `value` is a schedule or a number that is not negative."""
    if not callable(value):
        if not _is_number(value):
            raise TypeError(
                f"{where}: learning_rate must be a number or a schedule, a function of the count of applied updates, "
                f"such as optim.cosine_decay_schedule(3e-4, 1000); got {value!r}."
            )
        number(where, 0.0, learning_rate=value)


def leaf_function(where: str, name: str, value: Any, returns: str = "bool") -> None:
    """Raise `TypeError` unless `value` can be called with one logical leaf. `returns`: what it should return."""
    shape = f"of one logical leaf (with name, shape and dtype) that returns a {returns}"
    takes(where, name, value, 1, f"{shape}, such as lambda leaf: leaf.ndim > 1")


def _takes(function: Any, count: int) -> bool:
    try:
        inspect.signature(function).bind(*[None] * count)
    except TypeError:
        return False
    except ValueError:  # a builtin that tells no signature
        return True
    return True


def _is_number(value: Any) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def mask(where: str, value: Any) -> None:
    """Raise `TypeError` unless `value` is None or a function of one leaf."""
    if value is not None:
        leaf_function(where, "mask", value)


def leaf_constants(where: str, decays: Any, lr_scale: Any) -> None:
    """Raise `TypeError` unless a decay mask and a learning rate's factor are None or functions of one leaf."""
    mask(where, decays)
    if lr_scale is not None:
        leaf_function(where, "lr_scale", lr_scale, "float")


def transformation(where: str, value: Any, *, phases: bool = False) -> None:
    """Raise `TypeError` unless `value` is a gradient transformation, and `ValueError` for one that adds gradients over
    ranks itself, unless `phases` says that it may.

    For one of torch's optimizers the message names its counterpart.
    """
    if torch_optimizers.is_torchs(value):
        raise TypeError(f"{where}: expected a gradient transformation, got {torch_optimizers.advice(value)}")
    if not isinstance(value, GradientTransformation):
        pair = hasattr(value, "init") and hasattr(value, "update")
        instead = "optim.from_functions(tx.init, tx.update)" if pair else "optim.sgd(0.1)"
        raise TypeError(f"{where}: expected a gradient transformation such as {instead}, got {value!r}.")
    if value.about.phase is not None and not phases:
        raise ValueError(
            f"{where}: {value!r} averages the gradients of all parameters over ranks itself, so it cannot be inside "
            "another transformation. Use it as the optimizer, or as the last of optim.chain."
        )


def alone_in_chain(transformations: Sequence[GradientTransformation]) -> None:
    """Raise `ValueError` if an optimizer that adds gradients over ranks itself is not the last of a chain, or what
    stands before it needs the sums.
    """
    for k, value in enumerate(transformations):
        if value.about.phase is None:
            continue
        if k + 1 < len(transformations):
            raise ValueError(f"chain: {value!r} updates the parameters itself, so it must come last.")
        odd = next((x for x in transformations[:k] if x.fused is None or x.fused.factor is None), None)
        if odd is not None:
            raise ValueError(
                f"chain: {odd!r} cannot come before {value!r}, which averages gradients over ranks itself: each rank "
                "would change its own gradients differently. Before it, use only transformations that multiply "
                "all gradients by one number, such as optim.clip_by_global_norm."
            )


def needs_params(where: str, params: Any) -> None:
    """Raise `ValueError` if `update` was called without the parameters."""
    if params is None:
        raise ValueError(f"{where}: update needs the parameters. Write tx.update(grads, state, params).")


def takes(where: str, name: str, value: Any, count: int, shape: str) -> None:
    """Raise `TypeError` unless `value` is a function that can be called with `count` arguments.

    `shape`: the signature for the message, in words.
    """
    if not callable(value) or not _takes(value, count):
        got = f"{value!r}, which takes {inspect.signature(value)}" if callable(value) else repr(value)
        raise TypeError(f"{where}: {name} must be a function {shape}; got {got}.")
