"""A trainer's compiled step: all microbatches of an update, then the update."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import CodeType
from typing import Any, NamedTuple

import torch
from torch import Tensor

import zerofn

from ..effects import Effects
from ..modules import call_with, keep_assigned
from .gathering import gathered_in_step
from .modules import LossModule


def compiled_step(trainer: Any, effects: Effects) -> Any:
    """Return the step over all microbatches of an update: `parts`, one after the other, each of which is `stacked` of
    equal shape. Each part is (inputs, numbers of items or None, weights): the step's loss is the sum of the losses of
    microbatches, each times its weight. `effects`: of the trainer's `compute_loss`, whose results the step returns for
    each part.
    """

    def compute_loss(*args: Any, **kwargs: Any) -> Any:
        return trainer.compute_loss(*args, **kwargs)  # looked up where it runs: it is recorded there

    loss_module = LossModule(trainer.model, compute_loss, trainer.step_context)

    def train_step(state: Any, batch: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        parts, stacked = batch["parts"], batch["stacked"]
        buffers = {name: x.clone() for name, x in (state.extra or {}).items()}

        def loss_fn(params: dict[str, Tensor], inputs: dict[str, Any], num_items: Any, weight: Tensor) -> Any:
            named = {f"model.{name}": x for name, x in (*params.items(), *buffers.items())}
            with effects.recording(stacked * len(parts)) as recording, gathered_in_step(trainer.accelerator):
                out, found = call_with(loss_module, named, (inputs, num_items))
                loss = recording.plain(out)
            keep_assigned(found, buffers)
            return (loss * weight.reshape(())).to(loss.dtype), recording.results

        found = []
        for k, (inputs, num_items, weights) in enumerate(parts):
            key = zerofn.random.fold_in(state.rng_at(), k)
            vg = state.value_and_grad(loss_fn, True, rng=key)
            if stacked > 1:
                vg = zerofn.accumulate(vg, stacked)
            # `accumulate` averages over the part.
            found.append(vg(inputs, num_items, weights * stacked))
        values, grads = zip(*found, strict=True)
        losses, results = zip(*values, strict=True)
        total = zerofn.tree_map(lambda *x: sum(x[1:], x[0]), *grads)
        aux = {"loss": sum(losses[1:], losses[0]), "grad_norm": zerofn.global_norm(total), "effects": results}
        return state.apply_gradients(total, extra=buffers or None), aux

    return zerofn.compile(train_step, broadcast_buffers=True, **trainer.args.compile_options)


_NEVER_CALLED = {
    "_save": "override save_model, and call super().save_model(output_dir, _internal_call) in it",
    "_wrap_model": "pass the finished model, Trainer(model=...)",
}
_OF_GRADIENTS = ("_clip_grad_norm", "_get_grad_norm")
_GRADIENTS = ("grad", "clip_grad_norm_", "clip_grad_value_", "get_total_norm")
_SEE_GRADIENTS = ("on_pre_optimizer_step", "on_optimizer_step")


def check_overrides(trainer: Any) -> None:
    """Raise `ValueError` for methods of a subclass, and of callbacks, that take gradients, or are never called."""
    kind = type(trainer).__name__
    for own in _wrapped(trainer.training_step):
        if _names(own.__code__, "backward"):
            raise ValueError(
                f"{kind}.training_step calls backward{_at(own)}, but gradients exist inside the compiled step only. "
                "Compute the loss in compute_loss. In training_step, call super().training_step(model, inputs, "
                "num_items_in_batch), which returns the loss."
            )
    for name, instead in _NEVER_CALLED.items():
        if (own := _override(trainer, name)) is not None:
            raise ValueError(f"{kind}.{name}{_at(own)} would never be called: {instead}.")
    for name in _OF_GRADIENTS:
        own = _override(trainer, name)
        if own is not None and (not _names(own.__code__, "super") or any(_names(own.__code__, x) for x in _GRADIENTS)):
            raise ValueError(
                f"{kind}.{name}{_at(own)} uses gradients, which exist inside the compiled step only. To clip "
                "gradients, write TrainingArguments(max_grad_norm=...); a callback may change max_grad_norm during "
                f"training. To read the norm of the gradients, call super().{name}."
            )
    for callback in trainer.callback_handler.callbacks:
        for name in _SEE_GRADIENTS:
            own = getattr(getattr(callback, name, None), "__func__", None)
            if own is not None and any(_names(own.__code__, x) for x in _GRADIENTS):
                raise ValueError(
                    f"{type(callback).__name__}.{name}{_at(own)} uses gradients, which exist inside the compiled step "
                    "only. To clip gradients, write TrainingArguments(max_grad_norm=...). To read the norm of the "
                    "gradients, read grad_norm in the logs."
                )


def _override(trainer: Any, name: str) -> Any:
    """Return the method that a user's class has in place of one, None if there is none."""
    own = getattr(trainer, name)
    own = getattr(own, "__func__", own)
    ours = getattr(own, "__module__", "").partition(".")[0] in ("zerofn", "transformers", "trl")
    return None if ours or not hasattr(own, "__code__") else own


def _wrapped(method: Any) -> Iterator[Any]:
    """Yield a method, and those that it wraps, that have code."""
    while method is not None:
        if hasattr(method, "__code__"):
            yield method
        method = getattr(method, "__wrapped__", None)


def _at(method: Any) -> str:
    return f" (line {method.__code__.co_firstlineno} of {method.__code__.co_filename})"


def _names(code: CodeType, name: str) -> bool:
    return name in code.co_names or any(_names(x, name) for x in code.co_consts if isinstance(x, CodeType))


class Microbatch(NamedTuple):
    """What `training_step` is given. `items`: `num_items_in_batch`, of shape (1,). `weight`: of its loss in the sum
    over an update, of shape (1,). `kind`: tells whether other ranks, which must do the same, have equal shapes, too.
    """

    inputs: dict[str, Any]
    items: Tensor | None
    weight: Tensor
    kind: Any = None


def microbatch_of(trainer: Any, inputs: dict[str, Any], num_items: Any, kind: Any) -> Microbatch:
    """Return a microbatch with the weight that transformers gives it: 1 if its loss is a share of the group's, else one
    over the size of the group that the loop has fetched. An update may have those of two groups: the last group of a
    dataset without a length may be short, and is added to the next epoch's first.
    """
    own = getattr(trainer, "loss_is_scaled_for_ga", None)
    adds_up = trainer.model_accepts_loss_kwargs and num_items is not None
    is_scaled = own if own is not None else adds_up or trainer.compute_loss_func is not None
    weight = 1.0 if is_scaled else 1.0 / trainer.current_gradient_accumulation_steps
    device = trainer.args.device
    items = None if num_items is None else torch.as_tensor(num_items, device=device).reshape(1)
    return Microbatch(inputs, items, torch.tensor([weight], dtype=torch.float64, device=device), kind)


def stack(micro: Sequence[Microbatch]) -> tuple[tuple[Any, ...], int]:
    """Return (parts, stacked) of `compiled_step`: microbatches of equal shapes are one part, with all their rows;
    others are parts of their own.
    """
    shapes = {_shapes(x.inputs) for x in micro}
    if len(micro) == 1 or len(shapes) > 1 or None in shapes or len({(x.kind, x.items is None) for x in micro}) > 1:
        return tuple(x[:3] for x in micro), 1
    inputs = {k: torch.cat([x.inputs[k] for x in micro]) for k in micro[0].inputs}
    items = None if micro[0].items is None else torch.cat([x.items for x in micro if x.items is not None])
    return ((inputs, items, torch.cat([x.weight for x in micro])),), len(micro)


def _shapes(inputs: dict[str, Any]) -> tuple[Any, ...] | None:
    """Return what must be equal to be stacked; None for what has no rows."""
    if not all(isinstance(x, Tensor) and x.dim() for x in inputs.values()):
        return None
    return tuple((k, tuple(x.shape), x.dtype) for k, x in sorted(inputs.items()))
