"""What stands in a model's place: in the captured step, and in transformers' evaluation loops."""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from ..losses import LossesInFloat32


class LossModule(nn.Module):
    """A trainer's `compute_loss` as a module, so that `functional_call` gives the model its parameters inside.

    `context`: makes a context in which it runs.
    """

    def __init__(
        self,
        model: nn.Module,
        compute_loss: Callable[..., Tensor],
        context: Callable[[], contextlib.AbstractContextManager[Any]],
    ) -> None:
        super().__init__()
        self.model = model
        self._compute_loss, self._context = compute_loss, context

    def forward(self, inputs: dict[str, Any], num_items: Tensor | None) -> Tensor:
        """Return the loss of a batch."""
        items = None if num_items is None else num_items.reshape(())
        with self._context(), LossesInFloat32():
            return self._compute_loss(self.model, dict(inputs), num_items_in_batch=items)


class EvaluatedModule(nn.Module):
    """What evaluation loops call in the model's place. `step(inputs) -> outputs`: a compiled step.

    `model` returns the model, whose mode this sets: a trainer with `model_init` makes another one for each run.
    """

    def __init__(self, model: Callable[[], nn.Module], step: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
        super().__init__()
        self._step, self._model = step, model

    def forward(self, **inputs: Any) -> dict[str, Any]:
        """Return what the model returns, as a dict."""
        return OrderedDict(self._step({k: v for k, v in inputs.items() if v is not None}))

    def train(self, mode: bool = True) -> EvaluatedModule:
        """Set the model's mode."""
        self._model().train(mode)
        return self

    def _get_name(self) -> str:  # label smoothing asks for it
        return self._model()._get_name()


def tensors_of(outputs: Any) -> dict[str, Any]:
    """Return the tensors among a model's outputs, and tuples of them; caches are left out."""
    if isinstance(outputs, Tensor):
        return {"logits": outputs}
    if isinstance(outputs, tuple):
        outputs = {f"output_{k}": x for k, x in enumerate(outputs)}
    return {k: v for k, v in outputs.items() if _is_tensors(v)}


def _is_tensors(x: Any) -> bool:
    return isinstance(x, Tensor) or (isinstance(x, tuple) and bool(x) and all(map(_is_tensors, x)))
