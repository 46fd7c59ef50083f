"""A module that `configure_model` builds: shapes where Lightning calls it, values where they are cut."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import nn

import zerofn


class Configured:
    """Lets a module's `configure_model` build shapes. `build()` builds a module with values afterwards.

    `broadcast(x)` returns rank 0's `x`: all ranks draw from the same generator.
    """

    def __init__(self, module: LightningModule, broadcast: Callable[[Any], Any]) -> None:
        self._module, self._broadcast = module, broadcast
        self._before, self._configure = _contents(module), module.configure_model
        self._generator: torch.Tensor | None = None
        object.__setattr__(module, "configure_model", self._shapes)

    def _shapes(self) -> None:
        del self._module.__dict__["configure_model"]
        self._generator = self._broadcast(torch.get_rng_state())
        zerofn.skeleton(lambda: self._configure() or self._module)

    def build(self) -> LightningModule:
        """Return the module as `configure_model` would have left it."""
        assert self._generator is not None
        fresh: LightningModule = copy.copy(self._module)
        fresh.__dict__.update({k: copy.copy(v) for k, v in self._before.items()})
        with torch.random.fork_rng(devices=()):
            torch.set_rng_state(self._generator)
            type(self._module).configure_model(fresh)
        return fresh


def _contents(module: nn.Module) -> dict[str, Any]:
    """Return a module's attributes, to build it again from."""
    return {k: copy.copy(v) if isinstance(v, dict) else v for k, v in module.__dict__.items()}
