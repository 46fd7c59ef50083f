"""The optimizer and the scheduler of a `Trainer`: torch's own objects, which say how parameters are updated."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate.optimizer import AcceleratedOptimizer
from torch import nn

import zerofn

from ..param_groups import ParamGroups

_NUMBERS = ("lr", "betas", "momentum", "weight_decay")
RATES = "zerofn_rates.pt"  # in a checkpoint: what the optimizer's groups and the scheduler say


class Followed(AcceleratedOptimizer):
    """What the loop and callbacks have of a torch optimizer: its groups, which every step reads, and its hooks.

    Its `step` comes after the captured one, which has updated the parameters.
    """

    _is_accelerate_prepared = True

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(optimizer, device_placement=False)
        self.was_skipped = False
        self.updated = False

    @property
    def step_was_skipped(self) -> bool:
        """Whether the last step has updated nothing, as gradients of float16 had no room in it."""
        return self.was_skipped

    def step(self, closure: Any = None) -> None:
        """Let the optimizer's hooks and schedulers know of an update."""
        if not self.updated:
            raise ValueError(
                "Trainer.training_step: an update is due, but super().training_step was not called for its batches. "
                "Call super().training_step(model, inputs, num_items_in_batch), which computes the loss by "
                "compute_loss, and its gradients."
            )
        self.updated = False
        self._refuse_gradients()
        self.optimizer.step()

    def _refuse_gradients(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    raise ValueError(
                        f"Trainer: a parameter of shape {tuple(p.shape)} has a gradient that the step did not compute. "
                        "A step computes gradients of compute_loss only. Add your loss term there."
                    )


def own_optimizer(optimizer: Any) -> Any:
    """Return the torch optimizer itself."""
    while isinstance(optimizer, AcceleratedOptimizer):
        optimizer = optimizer.optimizer
    return optimizer


def groups_of(
    optimizer: Any, model: nn.Module, source: str, max_norm: float | None, before: ParamGroups | None = None
) -> ParamGroups:
    """Return what an optimizer says of a model's parameters. `source`: what made it. `before`: those whose moments are
    taken over.

    Raises `ValueError` for one that has no translation, or that has already been used.
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ValueError(
            f"{source} set self.optimizer to {type(optimizer).__name__}, expected a torch.optim.Optimizer."
        )
    clip = zerofn.optim.clip_by_global_norm(max_norm) if max_norm and max_norm > 0 else None
    return ParamGroups(optimizer, model, source, clip, others_too=True, before=before)


def number_of(optimizer: Any, max_norm: float | None) -> int:
    """Return a number of what an optimizer's groups say, and of the norm that clips: other ranks' must be the same."""
    said = [tuple((k, v) for k, v in group.items() if k in _NUMBERS) for group in optimizer.param_groups]
    return zlib.crc32(repr((said, max_norm)).encode())


def check_alike(numbers: Sequence[int], optimizer: Any, max_norm: float | None) -> None:
    """Raise `ValueError` unless all ranks have the same number."""
    others = [rank for rank, x in enumerate(numbers) if x != numbers[0]]
    if others:
        rates = ", ".join(f"{group['lr']:g}" for group in optimizer.param_groups)
        raise ValueError(
            f"Trainer: the optimizer's groups, or max_grad_norm, differ between rank {others[0]} and rank 0. Rank "
            f"{zerofn.rank()} has the learning rates {rates} and max_grad_norm={max_norm}. Each rank would update its "
            "shards differently. Let the callback or scheduler set the same values on every rank."
        )


def save_rates(optimizer: Any, scheduler: Any, folder: str | Path) -> None:
    """Write what the optimizer's groups and the scheduler say."""
    groups = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
    torch.save({"groups": groups, "scheduler": scheduler.state_dict()}, Path(folder) / RATES)


def load_rates(optimizer: Any, scheduler: Any, folder: str | Path) -> None:
    """Read what `save_rates` has written. Raises `ValueError` where the groups are others."""
    found = torch.load(Path(folder) / RATES, weights_only=True)
    ours = len(optimizer.param_groups)
    if len(found["groups"]) != ours:
        raise ValueError(
            f"Trainer: {folder} was saved with {len(found['groups'])} parameter groups, but this optimizer has {ours}. "
            "Make the same groups."
        )
    for group, theirs in zip(optimizer.param_groups, found["groups"], strict=True):
        group.update(theirs)
    scheduler.load_state_dict(found["scheduler"])
