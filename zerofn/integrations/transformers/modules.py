"""What stands in a model's place in the captured step."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

import zerofn

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

    def forward(self, inputs: dict[str, Any], num_items: Tensor | None) -> tuple[Tensor, dict[str, Tensor]]:
        """Return (the loss of a batch, the buffers that there are then)."""
        items = None if num_items is None else num_items.reshape(())
        with self._context(), LossesInFloat32():
            loss = self._compute_loss(self.model, dict(inputs), num_items_in_batch=items)
        return loss, dict(self.model.named_buffers())


@contextlib.contextmanager
def inputs_in(dtype: torch.dtype | None, model: nn.Module, labels: Sequence[str]) -> Iterator[None]:
    """Inside, a model is called with floating-point inputs of this dtype, if one is given; labels stay as they are."""

    def cast(x: Any) -> Any:
        return x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() else x

    def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        named = {k: v if k in labels else zerofn.tree_map(cast, v) for k, v in kwargs.items()}
        return zerofn.tree_map(cast, args), named

    with contextlib.ExitStack() as until:
        if dtype is not None:
            until.callback(model.register_forward_pre_hook(before, with_kwargs=True).remove)
        yield
