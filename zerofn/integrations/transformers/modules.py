"""What stands in a model's place in the captured step."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from accelerate.utils import convert_to_fp32
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

import zerofn

from ..losses import as_autocast


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
        with self._context():
            loss = self._compute_loss(self.model, dict(inputs), num_items_in_batch=items)
        return loss, dict(self.model.named_buffers())


@contextlib.contextmanager
def calls_as_autocast(model: nn.Module, device: torch.device, dtype: torch.dtype | None) -> Iterator[None]:
    """Inside, calls of a model whose parameters are lent in half precision, `dtype`, are what accelerate makes of them:
    they compute as under autocast and return float32. Whatever else reads the parameters has them in float32. Nothing
    changes if `dtype` is None.
    """
    if dtype is None:
        yield
        return
    outside = _InFloat32(model)
    own, forward = vars(model).get("forward"), model.forward

    @functools.wraps(forward)
    def as_autocasted(*args: Any, **kwargs: Any) -> Any:
        with outside.left(), as_autocast(device, dtype):
            return convert_to_fp32(forward(*args, **kwargs))

    vars(model)["forward"] = as_autocasted
    try:
        with outside:
            yield
    finally:
        del vars(model)["forward"]
        if own is not None:
            vars(model)["forward"] = own


class _InFloat32(TorchFunctionMode):
    """Inside, torch's functions take a module's parameters as float32."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self._lent = {id(p): p for p in module.parameters()}
        self._is_left = False

    @contextlib.contextmanager
    def left(self) -> Iterator[None]:
        """Inside, they are what they are."""
        before, self._is_left = self._is_left, True
        try:
            yield
        finally:
            self._is_left = before

    def __torch_function__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not self._is_left:
            args, kwargs = zerofn.tree_map(self._float, (args, kwargs))
        return func(*args, **kwargs)

    def _float(self, x: Any) -> Any:
        return x.float() if id(x) in self._lent and x.is_floating_point() else x
