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
            f"{name}: manual optimization calls backward itself, but a captured step has no autograd graph outside it. "
            "Write the step as a function: zerofn.compile(train_step)."
        )
    for path, p in module.named_parameters():
        if nn.parameter.is_lazy(p):
            raise ValueError(
                f"{name}: {path!r} has no shape before the first batch, but the state needs all shapes. Run the module "
                "once in __init__ or configure_model, under torch.no_grad(): self(example). Or pass the number of "
                "inputs to the layer."
            )
    plugin = getattr(trainer.strategy, "_precision_plugin", None)
    if plugin is not None and not type(plugin).__module__.startswith("lightning."):
        raise ValueError(
            f"Trainer(plugins={type(plugin).__name__}()): the precision belongs to the state, so no method of this "
            "plugin would be called. Write Trainer(precision=...) instead."
        )
    callbacks: list[pl.Callback] = trainer.callbacks  # type: ignore[attr-defined]
    for owner in (module, *callbacks):
        for hook in _ON_GRADIENTS:
            if hasattr(owner, hook) and is_overridden(hook, owner):
                raise ValueError(
                    f"{type(owner).__name__}.{hook} would not be called: gradients exist inside the compiled step "
                    "only. Leave it out."
                )
    if getattr(trainer.strategy, "_layer_sync", None) is not None:
        raise ValueError(
            "Trainer(sync_batchnorm=True) is not supported with ZeroFn: batch norm uses the mean and variance of each "
            "rank's own rows, and all ranks store the running statistics of rank 0. Leave it out."
        )
    if torch.is_anomaly_enabled() or getattr(trainer, "_detect_anomaly", False):
        raise ValueError("Trainer(detect_anomaly=True) has no effect on a compiled step. Leave it out.")
