"""The model as transformers' evaluation loops have it: a call runs a compiled step."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers.utils import ModelOutput

import zerofn

from ..effects import Effects
from ..modules import call_with


class EvaluatedModel:
    """A model whose call runs `step(inputs) -> outputs`, a compiled step. All else is the model's own: its class, its
    attributes, its parameters, `generate`.

    `model` returns the model: a trainer with `model_init` makes another one for each run.
    """

    def __init__(self, model: Callable[[], nn.Module], step: Callable[[dict[str, Any]], Any]) -> None:
        self.__dict__.update(_zerofn_model=model, _zerofn_step=step)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the model returns, of the same class."""
        names = inspect.signature(self._zerofn_model().forward).parameters if args else ()
        inputs = {**dict(zip(names, args, strict=False)), **kwargs}
        return self._zerofn_step({k: v for k, v in inputs.items() if v is not None})

    forward = __call__

    @property  # type: ignore[misc]
    def __class__(self) -> type:  # `isinstance` asks for it
        return type(self._zerofn_model())

    def __getattr__(self, name: str) -> Any:
        return getattr(self._zerofn_model(), name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._zerofn_model(), name, value)

    def to(self, *args: Any, **kwargs: Any) -> EvaluatedModel:
        """Leave the model where it is: its values are in a state, and the step casts them for `bf16_full_eval`."""
        return self

    def train(self, mode: bool = True) -> EvaluatedModel:
        """Set the model's mode."""
        self._zerofn_model().train(mode)
        return self

    def eval(self) -> EvaluatedModel:
        """Set the model's mode."""
        return self.train(False)


def outputs_of(trainer: Any, effects: Effects) -> Callable[[dict[str, Any], dict[str, Any]], Any]:
    """Return `(values, inputs) -> (outputs, results)` of a trainer's model, a step to compile. `effects`: those of the
    model, whose results they are.
    """

    def outputs(values: dict[str, Any], inputs: dict[str, Any]) -> Any:
        # They ask for gradients, and get none: what is computed with them is the step's, not left to be done after it.
        whole = {name: x.detach() for name, x in zerofn.gather(values["params"]).items()}
        params = {name: x.requires_grad_(x.is_floating_point()) for name, x in whole.items()}
        named = {**params, **values["buffers"]}
        dtype = trainer.args.evaluates_in
        if dtype is not None and not trainer.is_in_train:
            named = {name: x.to(dtype) if x.is_floating_point() else x for name, x in named.items()}
        with torch.no_grad(), effects.recording() as recording, trainer.in_precision():
            found = tensors_of(call_with(trainer.model, named, (), dict(inputs)), recording.plain)
        return found, recording.results

    return outputs


def tensors_of(x: Any, plain: Callable[[Any], Any] = lambda x: x) -> Any:
    """Return a model's outputs with its tensors alone, those that `plain` makes of them; None for what has no tensors,
    such as a cache.
    """
    x = plain(x)
    if isinstance(x, Tensor):
        return x
    if isinstance(x, Mapping):
        found = {k: y for k, v in x.items() if (y := tensors_of(v, plain)) is not None}
        return _like(x, found) if found else None
    if isinstance(x, tuple | list):
        kept = [y for v in x if (y := tensors_of(v, plain)) is not None]
        if not kept and len(x):
            return None
        return type(x)(kept) if type(x) in (tuple, list) else tuple(kept)
    return None


def mapped(function: Callable[[str, Tensor], Tensor], x: Any, name: str = "") -> Any:
    """Return outputs with `function(key, tensor)` of each tensor; a tensor that is in a tuple has the tuple's key."""
    if isinstance(x, Mapping):
        return _like(x, {k: mapped(function, v, k) for k, v in x.items()})
    if isinstance(x, tuple | list):
        return type(x)(mapped(function, v, name) for v in x)
    return function(name, x)


def _like(x: Mapping[str, Any], found: dict[str, Any]) -> Any:
    return type(x)(**found) if isinstance(x, ModelOutput) else found
