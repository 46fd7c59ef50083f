"""What to write instead of torch's optimizers, which change parameters in place and store their state themselves."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch

from ..util.arguments import meant

F = TypeVar("F", bound=Callable[..., Any])

# torch's name -> (ours, torch's hyperparameter -> our argument); `betas` stands for b1 and b2.
_BETAS = {"lr": "learning_rate", "betas": "b1, b2", "eps": "eps"}
_COUNTERPARTS: dict[str, tuple[str, Mapping[str, str]]] = {
    "Adafactor": ("adafactor", {"lr": "learning_rate"}),
    "Adagrad": ("adagrad", {"lr": "learning_rate", "initial_accumulator_value": "initial_accumulator_value"}),
    "Adam": ("adam", _BETAS),
    "AdamW": ("adamw", {**_BETAS, "weight_decay": "weight_decay"}),
    "Muon": ("muon", {"lr": "learning_rate", "momentum": "beta", "weight_decay": "weight_decay"}),
    "NAdam": ("nadamw", _BETAS),
    "RAdam": ("radam", _BETAS),
    "RMSprop": (
        "rmsprop",
        {"lr": "learning_rate", "alpha": "decay", "eps": "eps", "momentum": "momentum", "centered": "centered"},
    ),
    "SGD": (
        "sgd",
        {"lr": "learning_rate", "momentum": "momentum", "nesterov": "nesterov", "weight_decay": "weight_decay"},
    ),
}
_OFF_AT_ZERO = ("momentum", "nesterov", "centered")
_ALWAYS = {"rmsprop": ["eps_in_sqrt=False"], "nadamw": ["weight_decay=0.0"]}


def is_torchs(value: Any) -> bool:
    """Return whether `value` is one of torch's optimizers, or the class of one."""
    kind = torch.optim.Optimizer
    return isinstance(value, kind) or (isinstance(value, type) and issubclass(value, kind))


def advice(value: Any) -> str:
    """Return the end of an error message: what `value` is, why it does not fit, and what to write instead."""
    kind = value if isinstance(value, type) else type(value)
    names = [c.__name__ for c in kind.__mro__ if c.__module__.startswith("torch.") and c.__name__ in _COUNTERPARTS]
    shown = f"torch.optim.{kind.__name__}" if kind.__module__.startswith("torch.") else kind.__name__
    why = f"{shown}, which changes parameters in place and stores its state itself"
    if not names:
        return f"{why}. zerofn.optim has no counterpart: write it as two functions, optim.from_functions(init, update)."
    return f"{why}. Write {_counterpart(value, *_COUNTERPARTS[names[0]])} instead."


def _counterpart(value: Any, ours: str, names: Mapping[str, str]) -> str:
    """Return our counterpart as code, with the hyperparameters of an optimizer; of a class, with the learning rate
    alone.
    """
    if isinstance(value, type):
        return f"optim.{ours}(learning_rate)"
    out = []
    for theirs, own in names.items():
        found = value.defaults.get(theirs)
        values = found if isinstance(found, tuple | list) else [found]
        if all(isinstance(x, int | float) for x in values) and (theirs not in _OFF_AT_ZERO or found):
            pairs = zip(own.split(", "), values, strict=True)
            out += [repr(x) if n == "learning_rate" else f"{n}={x!r}" for n, x in pairs]
    text = f"optim.{ours}({', '.join(out + _ALWAYS.get(ours, []))})"
    decay = value.defaults.get("weight_decay")
    if decay and "weight_decay" not in names:
        return f"optim.chain(optim.add_decayed_weights({decay!r}), {text})"
    return text


def told(function: F) -> F:
    """Return one of our optimizers that, called with torch's or misspelt names, says what arguments are called here."""
    own = tuple(inspect.signature(function).parameters)
    ours = {"lr": "learning_rate", "betas": "b1 and b2", "alpha": "decay", "momentum_decay": "b1"}

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        for name in kwargs:
            if name not in own:
                optax = f"Its arguments have optax's names: write {ours[name]}=." if name in ours else ""
                raise TypeError(f"optim.{function.__name__} has no argument {name!r}. {optax or meant(name, own)}")
        return function(*args, **kwargs)

    return call  # type: ignore[return-value]
