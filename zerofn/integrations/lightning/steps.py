"""The compiled steps of a `LightningModule`: gradients, an update, and both in one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn

import zerofn

from ..effects import Effects
from ..losses import as_autocast
from ..modules import call_with
from .watched_module import ModuleWatch, as_batch, computes


class _TrainingStep(nn.Module):
    """A module's `training_step` as a forward, so that `call_with` lends the module its parameters inside."""

    def __init__(self, module: LightningModule, watch: ModuleWatch, effects: Effects) -> None:
        super().__init__()
        self.module = module
        self.watch, self.effects = watch, effects

    def forward(self, batch: Mapping[str, Any]) -> tuple[Any, Any, dict[str, Tensor]]:
        """Return (what `training_step` returns, results for its effects, the module's buffers)."""
        watch = self.watch
        with self.effects.recording() as recording, watch.during(self.module, recording, batch["global_step"]):
            numbers = [watch.number(k, x) for k, x in enumerate(batch["numbers"])]
            out = recording.plain(self.module.training_step(batch["batch"], *numbers))
        return out, recording.results, dict(self.module.named_buffers())


class Steps:
    """The steps of a module: gradients alone, which add to those that are `sums`; an update by them; or both in one.

    `steps(state, args, share, update) -> (state, what training_step returned on this rank)`. `share`: a
    microbatch's share of the update.
    """

    def __init__(
        self, module: LightningModule, watch: ModuleWatch, precision: str | None, options: Mapping[str, Any]
    ) -> None:
        self._module, self._watch, self._options = module, watch, {**options, "broadcast_buffers": True}
        self._effects = Effects(module, "training_step", LightningModule, ["logger", "loggers", "print"])
        self._part = _TrainingStep(module, watch, self._effects)
        self._device, self._dtype = module.device, computes(precision)
        self.sums: Any = None  # gradients since they were last set to zero; None: there are none
        self._whole = zerofn.compile(self._update, **self._options)
        self._first = zerofn.compile(self._add, **self._options)
        self._last = zerofn.compile(self._update_with_sums, **self._options)
        self._alone = zerofn.compile(self._update_by_sums, **self._options)

    def __call__(self, state: Any, args: tuple[Any, ...], share: float, update: bool) -> tuple[Any, Any]:
        """Run the step that it is."""
        batch = self._batch(args, share)
        if update and self.sums is None:
            state, aux = self._whole(state, batch)
        else:
            if self.sums is None:
                self.sums = zerofn.tree_map(torch.zeros_like, state.params)
            step = self._last if update else self._first
            both, aux = step({"state": state, "sums": self.sums}, batch)
            state, self.sums = both["state"], None if update else both["sums"]
        self._watch.give(args[1:])
        self._effects.replay(aux["effects"])
        return state, aux["out"]

    def update(self, state: Any) -> Any:
        """Return the state after an update by the gradients that are there."""
        if self.sums is None:
            raise ValueError(
                f"{type(self._module).__name__}: optimizer.step() was called without gradients: no closure has run "
                "since the last update. Pass the closure: optimizer.step(closure=optimizer_closure)."
            )
        both, _ = self._alone({"state": state, "sums": self.sums}, {})
        self.sums = None
        return both["state"]

    def _batch(self, args: tuple[Any, ...], share: float) -> dict[str, Any]:
        """Return the inputs of a step: numbers that change at every call are tensors, others lead to a capture."""
        trainer = self._module.trainer
        return {
            "batch": as_batch(args[0]) if args else None,
            "numbers": [torch.tensor(x) for x in args[1:]],
            "global_step": torch.tensor(trainer.global_step),
            "changed": self._watch.changed(trainer),
            "share": share,
        }

    def _gradients(self, state: Any, batch: dict[str, Any]) -> tuple[Any, Any, Any]:
        """Return (gradients, buffers, aux) of a microbatch."""

        def loss_fn(params: dict[str, Tensor], buffers: dict[str, Tensor]) -> tuple[Tensor, Any]:
            named = {f"module.{name}": x for name, x in (*params.items(), *buffers.items())}
            with as_autocast(self._device, self._dtype):
                out, effects, found = call_with(self._part, named, (batch,))
            loss = _loss_of(out, self._module)
            assigned = {name: x.detach() for name, x in found.items() if x is not buffers.get(name, x)}
            return loss * batch["share"], (_detached(out), effects, assigned)

        before = state.extra or {}
        buffers = {name: x.clone() for name, x in before.items()}
        (_, (out, effects, assigned)), grads = state.value_and_grad(loss_fn, has_aux=True)(buffers)
        after = {name: x.to(before[name].dtype) for name, x in (buffers | assigned).items()}
        return grads, after or None, {"out": out, "effects": effects}

    def _update(self, state: Any, batch: dict[str, Any]) -> tuple[Any, Any]:
        grads, buffers, aux = self._gradients(state, batch)
        return state.apply_gradients(grads, extra=buffers), aux

    def _add(self, both: dict[str, Any], batch: dict[str, Any]) -> tuple[Any, Any]:
        state = both["state"]
        grads, buffers, aux = self._gradients(state, batch)
        return {"state": state.replace(extra=buffers), "sums": zerofn.tree_map(torch.add, both["sums"], grads)}, aux

    def _update_with_sums(self, both: dict[str, Any], batch: dict[str, Any]) -> tuple[Any, Any]:
        state = both["state"]
        grads, buffers, aux = self._gradients(state, batch)
        total = zerofn.tree_map(torch.add, both["sums"], grads)
        return {"state": state.apply_gradients(total, extra=buffers), "sums": total}, aux

    def _update_by_sums(self, both: dict[str, Any], batch: dict[str, Any]) -> tuple[Any, Any]:
        state, sums = both["state"], both["sums"]
        return {"state": state.apply_gradients(sums), "sums": sums}, {}


def _loss_of(out: Any, module: LightningModule) -> Tensor:
    loss = out.get("loss") if isinstance(out, Mapping) else out
    if not isinstance(loss, Tensor):
        what = "None, which skips a batch" if out is None else f"a {type(out).__name__} without a loss"
        raise ValueError(
            f"{type(module).__name__}.training_step returned {what}, but a captured step needs a loss. Return a "
            "tensor, or a dict with the tensor 'loss'."
        )
    return loss


def _detached(out: Any) -> Any:
    return zerofn.tree_map(
        lambda x: x.detach() if isinstance(x, Tensor) else x, dict(out) if isinstance(out, Mapping) else out
    )
