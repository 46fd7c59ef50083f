"""What has no counterpart here is refused before training begins."""

from __future__ import annotations

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import nn

_ON_GRADIENTS = (
    "backward",
    "configure_gradient_clipping",
    "on_after_backward",
    "on_before_backward",
    "on_before_optimizer_step",
    "optimizer_zero_grad",
)


def check(trainer: pl.Trainer, module: pl.LightningModule) -> None:
    """Raise `ValueError` for what a module, its callbacks or the trainer ask for, and would not get."""
    name = type(module).__name__
    if not module.automatic_optimization:
        raise ValueError(
            f"{name}: manual optimization calls backward by itself, and there is no graph to do so; write such a "
            "step as a function: zerofn.compile(train_step)."
        )
    for path, p in module.named_parameters():
        if nn.parameter.is_lazy(p):
            raise ValueError(
                f"{name}: {path!r} has no shape before the first batch, and the state is made of shapes. Run the "
                "module once in __init__ or configure_model, as in torch.no_grad(): self(example), or give the layer "
                "its number of inputs."
            )
    plugin = getattr(trainer.strategy, "_precision_plugin", None)
    if plugin is not None and not type(plugin).__module__.startswith("lightning."):
        raise ValueError(
            f"Trainer(plugins={type(plugin).__name__}()): the state has its precision, so no method of it would "
            "be called. Write Trainer(precision=...) instead."
        )
    callbacks: list[pl.Callback] = trainer.callbacks  # type: ignore[attr-defined]
    for owner in (module, *callbacks):
        for hook in _ON_GRADIENTS:
            if hasattr(owner, hook) and is_overridden(hook, owner):
                raise ValueError(
                    f"{type(owner).__name__}.{hook}: gradients exist inside the compiled step only; leave it out."
                )
    if getattr(trainer.strategy, "_layer_sync", None) is not None:
        raise ValueError(
            "Trainer(sync_batchnorm=True) is not there with ZeroFn: each rank's batch norm computes with the mean and "
            "variance of its own rows, and all ranks keep the running ones of rank 0. Leave it out."
        )
    if torch.is_anomaly_enabled() or getattr(trainer, "_detect_anomaly", False):
        raise ValueError("Trainer(detect_anomaly=True) has no effect on a compiled step. Leave it out.")
