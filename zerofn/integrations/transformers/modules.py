"""Modules whose parameters are elsewhere: in shards, until a step or `generate` needs them."""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn


class LossModule(nn.Module):
    """A trainer's `compute_loss` as a module, so that `functional_call` gives the model its parameters inside."""

    def __init__(self, model: nn.Module, compute_loss: Callable[..., Tensor]) -> None:
        super().__init__()
        self.model = model
        self._compute_loss = compute_loss

    def forward(self, inputs: dict[str, Any], num_items: Tensor | None) -> Tensor:
        """Return the loss of a batch."""
        items = None if num_items is None else num_items.reshape(())
        return self._compute_loss(self.model, dict(inputs), num_items_in_batch=items)


class EvaluatedModule(nn.Module):
    """What evaluation loops call in the model's place. `step(inputs) -> outputs`: a compiled step."""

    def __init__(self, model: nn.Module, step: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
        super().__init__()
        self._step = step
        self._name = model._get_name()
        self._modes = [model]  # in a list, which is no submodule

    def forward(self, **inputs: Any) -> dict[str, Any]:
        """Return what the model returns, as a dict."""
        return OrderedDict(self._step({k: v for k, v in inputs.items() if v is not None}))

    def train(self, mode: bool = True) -> EvaluatedModule:
        """Set the model's mode."""
        for model in self._modes:
            model.train(mode)
        return self

    def _get_name(self) -> str:  # label smoothing asks for it
        return self._name


def tensors_of(outputs: Any) -> dict[str, Any]:
    """Return the tensors among a model's outputs, and tuples of them; caches are left out."""
    if isinstance(outputs, Tensor):
        return {"logits": outputs}
    if isinstance(outputs, tuple):
        outputs = {f"output_{k}": x for k, x in enumerate(outputs)}
    return {k: v for k, v in outputs.items() if _is_tensors(v)}


def _is_tensors(x: Any) -> bool:
    return isinstance(x, Tensor) or (isinstance(x, tuple) and bool(x) and all(map(_is_tensors, x)))


def replace_parameters(module: nn.Module, new: Callable[[str, nn.Parameter], nn.Parameter]) -> None:
    """Put `new(name, parameter)` in the place of every parameter; tied ones stay one object."""
    made: dict[int, nn.Parameter] = {}
    for prefix, part in module.named_modules():
        for name, param in list(part.named_parameters(recurse=False)):
            if id(param) not in made:
                made[id(param)] = new(f"{prefix}.{name}" if prefix else name, param)
                made[id(made[id(param)])] = made[id(param)]
            setattr(part, name, made[id(param)])


def forget_values(module: nn.Module) -> None:
    """Leave a module the shapes of its parameters only."""
    replace_parameters(module, lambda _, p: nn.Parameter(p.detach().to("meta"), requires_grad=p.requires_grad))


@contextlib.contextmanager
def with_values(module: nn.Module, params: Mapping[str, Tensor]) -> Iterator[None]:
    """Inside, the module has these parameters, by name; afterwards their shapes only."""
    replace_parameters(module, lambda name, p: nn.Parameter(params[name], requires_grad=False))
    try:
        yield
    finally:
        forget_values(module)


def is_shape_only(module: nn.Module) -> bool:
    """Whether any parameter has no value."""
    return any(p.is_meta for p in module.parameters())


def buffers_to(module: nn.Module, device: torch.device) -> None:
    """Move the buffers of a module, whose parameters may have no values."""
    for part in module.modules():
        for name, x in list(part.named_buffers(recurse=False)):
            part._buffers[name] = x.to(device)
