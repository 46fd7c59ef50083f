"""Hyperparameters stored in the state, where they can be read and changed."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..util.arguments import known_arguments
from . import checks
from .base import About, Fused, GradientTransformation, count_zero, step

_OWN = (__package__ or "").split(".", 1)[0]
_OF_LEAVES = ("mask", "weight_decay_mask", "lr_scale", "matrices", "labels")  # functions of leaves, not schedules


class InjectHyperparamsState(NamedTuple):
    """The state of a transformation made by `inject_hyperparams`.

    `count`: applied updates, int64 scalar. `hyperparams`: name -> float64 scalar, the value that the last update
    used, or that `with_hyperparams` has set since. `inner_state`: the state of the transformation itself.

    >>> from zerofn import optim
    >>> state = optim.inject_hyperparams(optim.sgd)(learning_rate=0.5).init({"w": torch.zeros(2)})
    >>> state.hyperparams
    {'learning_rate': tensor(0.5000, dtype=torch.float64)}
    """

    count: Tensor  # type: ignore[assignment]  # tuple.count gives way
    hyperparams: dict[str, Tensor]
    inner_state: Any

    def with_hyperparams(self, **values: float | Tensor) -> InjectHyperparamsState:
        """Return the state with some hyperparameters set to numbers, or to tensors of one element.

        Outside a step, a new value needs no other capture. Inside a captured step, a number is a constant. For a value
        that changes between calls, pass a tensor, such as an entry of the batch. Raises `KeyError` for a name that is
        not injected, `TypeError` for a value that is neither a number nor such a tensor.
        """
        for name, value in values.items():
            if name not in self.hyperparams:
                raise KeyError(
                    f"with_hyperparams: {name!r} is not an injected hyperparameter; expected one of "
                    f"{list(self.hyperparams)}."
                )
            if not (isinstance(value, Tensor) and value.numel() == 1 and not value.is_complex()):
                checks.number(f"with_hyperparams: {name}", value=value)
        fresh = {name: _like(self.hyperparams[name], value) for name, value in values.items()}
        return self._replace(hyperparams={**self.hyperparams, **fresh})


def _like(scalar: Tensor, value: float | Tensor) -> Tensor:
    """Return a number, or a tensor's only element, as a scalar of this one's dtype and device."""
    if isinstance(value, Tensor):
        return value.detach().reshape(()).to(scalar, copy=True)
    return torch.full_like(scalar, value)


@known_arguments
def inject_hyperparams(
    inner_factory: Callable[..., GradientTransformation], static_args: str | Iterable[str] = ()
) -> Callable[..., GradientTransformation]:
    """Return `inner_factory` with its hyperparameters in the state, so that they can change without another capture.

        tx = optim.inject_hyperparams(optim.adamw)(3e-4, weight_decay=0.1)
        ...
        state = state.replace(opt_state=state.opt_state.with_hyperparams(learning_rate=1e-4))

    For ZeroFn's transformations, only arguments that accept a schedule are injected, such as learning rates; the others
    are constants of kernels. For your own factory, all floats and functions are injected, except masks and similar
    functions, and arguments named in `static_args`. The factory is called with float64 scalar tensors for injected
    arguments.

    An argument that is a function is taken as a schedule: it is called with the number of applied updates. The state
    shows the schedule's values, and setting such a value has no effect. Raises `ValueError` for a name in `static_args`
    that is not an argument, `TypeError` if a constant gets a schedule.

    >>> from zerofn import optim
    >>> tx = optim.inject_hyperparams(optim.sgd)(0.5)
    >>> state = tx.init({"w": torch.ones(1)})
    >>> float(state.with_hyperparams(learning_rate=0.25).hyperparams["learning_rate"])
    0.25
    """
    static = {static_args} if isinstance(static_args, str) else set(static_args)
    signature = inspect.signature(inner_factory)
    unknown = sorted(static - set(signature.parameters))
    if unknown:
        raise ValueError(
            f"inject_hyperparams: static_args has {unknown}, which are not arguments of "
            f"{_unwrapped(inner_factory).__name__}; its arguments are {list(signature.parameters)}."
        )

    @functools.wraps(inner_factory)
    def factory(*args: Any, **kwargs: Any) -> GradientTransformation:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        return _injected(_Factory(inner_factory, signature, dict(bound.arguments), frozenset(static)))

    return factory


class _Factory:
    """A factory with its arguments, and the choice of those that are injected: `numbers` and `schedules`."""

    def __init__(
        self,
        make: Callable[..., Any],
        signature: inspect.Signature,
        arguments: Mapping[str, Any],
        static: frozenset[str],
    ) -> None:
        self.make, self.signature, self.arguments, self.static = make, signature, arguments, static
        own = _unwrapped(make).__module__.split(".", 1)[0] == _OWN
        takes = {n: "ScalarOrSchedule" in str(p.annotation) for n, p in signature.parameters.items()}
        self.as_schedule = {name for name in arguments if own and takes[name]}
        chosen = [n for n in arguments if n not in static and n not in _OF_LEAVES]
        self.schedules = {n: arguments[n] for n in chosen if callable(arguments[n]) and _is_schedule(arguments[n])}
        wrong = [n for n in self.schedules if own and n not in self.as_schedule]
        if wrong:
            raise TypeError(
                f"inject_hyperparams: {wrong[0]} of {_unwrapped(make).__name__} is a constant of the optimizer's "
                "kernel, so it cannot be a schedule. Pass a number. These arguments can be schedules: "
                f"{sorted(self.as_schedule)}."
            )
        names = [n for n in chosen if n in self.as_schedule] if own else chosen
        self.numbers = {n: arguments[n] for n in names if isinstance(arguments[n], float) or n in self.as_schedule}
        self.numbers = {n: float(v) for n, v in self.numbers.items() if v is not None and n not in self.schedules}

    def values(self, state: InjectHyperparamsState) -> dict[str, Tensor]:
        """Return the hyperparameters of the next update."""
        fresh = {name: _scalar(schedule(state.count), state.count) for name, schedule in self.schedules.items()}
        return {**state.hyperparams, **fresh}

    def __call__(self, values: Mapping[str, Any]) -> GradientTransformation:
        """Return the transformation with `values` in place of the injected arguments."""
        changed = {n: _constant(v) if n in self.as_schedule else v for n, v in values.items()}
        bound = self.signature.bind_partial()
        bound.arguments.update({**self.arguments, **changed})
        return self.make(*bound.args, **bound.kwargs)


def _injected(factory: _Factory) -> GradientTransformation:
    prototype = factory({})  # with the original arguments, which are checked here

    def init(params: Any) -> InjectHyperparamsState:
        count = count_zero(params)
        values = {name: _scalar(value, count) for name, value in factory.numbers.items()}
        values |= {name: _scalar(schedule(count), count) for name, schedule in factory.schedules.items()}
        return InjectHyperparamsState(count, values, factory(values).init(params))

    def update(grads: Any, state: InjectHyperparamsState, params: Any = None) -> tuple[Any, InjectHyperparamsState]:
        values = factory.values(state)
        updates, inner = factory(values).update(grads, state.inner_state, params)
        return updates, InjectHyperparamsState(state.count + 1, values, inner)

    def apply(
        grads: Any, state: InjectHyperparamsState, params: Any, factor: Tensor | None, finite: Tensor | None
    ) -> tuple[Any, InjectHyperparamsState]:
        values = factory.values(state)
        params, inner = step(factory(values), grads, state.inner_state, params, factor, finite)
        if finite is not None:
            values = {name: torch.where(finite, x, state.hyperparams[name]) for name, x in values.items()}
        return params, InjectHyperparamsState(state.count + (1 if finite is None else finite), values, inner)

    def learning_rate(state: InjectHyperparamsState) -> Any:
        return factory.values(state)["learning_rate"]

    about = About(
        f"inject_hyperparams({_unwrapped(factory.make).__name__})",
        (factory.make, *map(_hashable, factory.arguments.values()), factory.static),
        prototype.about.label,
        learning_rate if "learning_rate" in {*factory.numbers, *factory.schedules} else None,
        prototype.about.phase,
    )
    fused = Fused(apply, by_runs=prototype.fused is not None and prototype.fused.by_runs)
    return GradientTransformation(init, update, about, prototype.masks, fused)


def _unwrapped(make: Any) -> Any:
    """Return the function that a `functools.partial` calls, or `make` itself."""
    return _unwrapped(make.func) if isinstance(make, functools.partial) else make


def _hashable(value: Any) -> Any:
    if isinstance(value, Mapping):
        return tuple(value.items())
    return tuple(value) if isinstance(value, list) else value


def _is_schedule(value: Any) -> bool:
    return not isinstance(value, type | GradientTransformation)


def _scalar(value: Any, like: Tensor) -> Tensor:
    """Return a number as a float64 scalar tensor, on the device of `like`."""
    if isinstance(value, Tensor):
        return value.to(torch.float64)
    return torch.full_like(like, value, dtype=torch.float64)


def _constant(value: Any) -> Any:
    """Return the schedule that always gives this tensor; a number stays a number."""
    return (lambda count: value) if isinstance(value, Tensor) else value
