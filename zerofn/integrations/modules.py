"""Modules whose parameters are elsewhere: in shards, until a step or an evaluation needs them."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def is_shape_only(module: nn.Module) -> bool:
    """Whether any parameter has no value."""
    return any(p.is_meta for p in module.parameters())


def buffers_to(module: nn.Module, device: torch.device) -> None:
    """Move the buffers of a module, whose parameters may have no values."""
    for part in module.modules():
        for name, x in list(part.named_buffers(recurse=False)):
            part._buffers[name] = x.to(device)


def places_of(module: nn.Module) -> dict[str, list[tuple[nn.Module, str]]]:
    """Return parameter name -> [(module, attribute)]: all places of a tied one."""
    names = {id(p): name for name, p in module.named_parameters()}
    found: dict[str, list[tuple[nn.Module, str]]] = {name: [] for name in names.values()}
    for part in module.modules():
        for last, p in part._parameters.items():
            if p is not None:
                found[names[id(p)]].append((part, last))
    return found


def saved_buffers(module: nn.Module) -> dict[str, Tensor]:
    """Return the buffers that a checkpoint of the module has, such as batch norm's statistics, by name."""
    saved = module.state_dict(keep_vars=True).keys()
    return {name: x for name, x in module.named_buffers() if name in saved}
