"""Modules whose parameters are elsewhere: in shards, until a step or an evaluation needs them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor, nn


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
