"""A trainer's compiled step: all microbatches of an update, then the update."""

from __future__ import annotations

from types import CodeType
from typing import Any

import torch
from torch import Tensor

import zerofn

from ..effects import Effects
from ..modules import call_with, keep_assigned
from .gathering import gathered_in_step
from .modules import LossModule


def compiled_step(trainer: Any, effects: Effects) -> Any:
    """Return the step over all microbatches of an update: `parts`, one after the other, each of which is `stacked` of
    equal shape. `shares`: whether the losses of microbatches add up to the step's, or are averaged. `effects`: of the
    trainer's `compute_loss`, whose results the step returns for each part.
    """

    def compute_loss(*args: Any, **kwargs: Any) -> Any:
        return trainer.compute_loss(*args, **kwargs)  # looked up where it runs: it is recorded there

    loss_module = LossModule(trainer.model, compute_loss, trainer.step_context)

    def train_step(state: Any, batch: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        parts, num_items, stacked = batch["parts"], batch["num_items"], batch["stacked"]
        factor = 1.0 if batch["shares"] else 1.0 / (stacked * len(parts))
        buffers = {name: x.clone() for name, x in (state.extra or {}).items()}

        def loss_fn(params: dict[str, Tensor], inputs: dict[str, Any], num_items: Any, factor: float) -> Any:
            named = {f"model.{name}": x for name, x in (*params.items(), *buffers.items())}
            with effects.recording() as recording, gathered_in_step(trainer.accelerator):
                out, found = call_with(loss_module, named, (inputs, num_items))
                loss = recording.plain(out)
            keep_assigned(found, buffers)
            return loss * factor, recording.results

        found = []
        for k, inputs in enumerate(parts):
            key = zerofn.random.fold_in(state.rng_at(), k)
            vg = zerofn.value_and_grad(loss_fn, True, scale=state.loss_scale, rng=key, frozen=state.frozen)
            if stacked > 1:
                vg = zerofn.accumulate(vg, stacked)
            found.append(vg(state.params, inputs, num_items, factor * stacked))
        values, grads = zip(*found, strict=True)
        losses, results = zip(*values, strict=True)
        total = zerofn.tree_map(lambda *x: sum(x[1:], x[0]), *grads)
        aux = {"loss": sum(losses[1:], losses[0]), "grad_norm": zerofn.global_norm(total), "effects": results}
        return state.apply_gradients(total).replace(extra=buffers or None), aux

    return zerofn.compile(train_step, **trainer.args.compile_options)


def check_training_step(trainer: Any) -> None:
    """Raise `ValueError` for a `training_step` that takes gradients by itself."""
    own = trainer.training_step
    while own is not None:
        code = getattr(own, "__code__", None)
        if code is not None and _names(code, "backward"):
            raise ValueError(
                f"{type(trainer).__name__}.training_step calls backward (line {code.co_firstlineno} of "
                f"{code.co_filename}): gradients exist inside the compiled step only. Put the loss into compute_loss; "
                "in training_step call super().training_step(model, inputs, num_items_in_batch), which returns it."
            )
        own = getattr(own, "__wrapped__", None)


def _names(code: CodeType, name: str) -> bool:
    return name in code.co_names or any(_names(x, name) for x in code.co_consts if isinstance(x, CodeType))


def stack(micro: list[dict[str, Any]]) -> tuple[tuple[dict[str, Any], ...], int]:
    """Return (parts, stacked): microbatches of equal shapes as one part with all their rows, others one by one."""
    if len(micro) > 1 and len({_shapes(x) for x in micro}) == 1 and _shapes(micro[0]) is not None:
        return ({k: torch.cat([x[k] for x in micro]) for k in micro[0]},), len(micro)
    return tuple(micro), 1


def _shapes(inputs: dict[str, Any]) -> tuple[Any, ...] | None:
    """Return what must be equal to be stacked; None for what has no rows."""
    if not all(isinstance(x, Tensor) and x.dim() for x in inputs.values()):
        return None
    return tuple((k, tuple(x.shape), x.dtype) for k, x in sorted(inputs.items()))
