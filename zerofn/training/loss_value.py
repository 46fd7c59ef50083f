"""What a loss function returned, as the loss of one microbatch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .loss_errors import warn_of_weight


class Loss(NamedTuple):
    """The loss of one microbatch.

    `mean` is differentiated. `total` is the loss function's sum, or its mean if it returns no weight. `weight` is
    the weight, or None.
    """

    mean: Tensor
    total: Tensor
    weight: Tensor | None
    aux: Any

    @property
    def detached(self) -> tuple[Tensor, Tensor | None]:
        """The loss function's sum, and the weight."""
        return self.total.detach(), self.weight


def loss_of(out: Any, has_aux: bool, wanted: Sequence[Tensor]) -> Loss:
    """Return the loss that `out`, what a loss function returned, means. `wanted`: what is differentiated. Raises
    `ValueError` or `TypeError` if it is none.
    """
    aux = None
    if has_aux:
        if not isinstance(out, tuple) or len(out) != 2:
            raise ValueError(f"value_and_grad(has_aux=True): loss_fn must return (loss, aux), got {_kind(out)}.")
        out, aux = out
    total, weight = out if isinstance(out, tuple) and len(out) == 2 else (out, None)
    if isinstance(getattr(total, "loss", None), Tensor):
        raise ValueError(
            f"value_and_grad: loss_fn must return a scalar tensor or (sum, weight), got {_kind(total)}, the whole "
            "output of a model. Write `return output.loss`."
        )
    if not isinstance(total, Tensor) or total.numel() != 1:
        raise ValueError(
            f"value_and_grad: loss_fn must return a scalar tensor or (sum, weight), got {_kind(out)}; "
            "write loss.mean(), or has_aux=True if the second value is not a weight."
        )
    if total.is_complex():
        raise ValueError(
            f"value_and_grad: loss_fn must return a real number, got {_kind(total)} of {total.dtype}; write "
            "loss.real, or loss.abs().square() of a complex error."
        )
    if not isinstance(weight, Tensor | int | float | None) or isinstance(weight, Tensor) and weight.numel() != 1:
        raise TypeError(
            f"value_and_grad: loss_fn returned (loss, {_kind(weight)}), but without has_aux the second value must be a "
            "weight, one number. Write value_and_grad(loss_fn, has_aux=True)."
        )
    total = total.reshape(()).to(torch.promote_types(total.dtype, torch.float32))
    if weight is None:
        return Loss(total, total, None, aux)
    weight = torch.as_tensor(weight, device=total.device)
    warn_of_weight(weight, wanted)
    weight = weight.detach().reshape(()).to(total.dtype)
    # A rank without tokens has weight 0 and sum 0: it adds nothing, instead of 0 / 0.
    return Loss(total / torch.where(weight == 0, torch.ones_like(weight), weight), total, weight, aux)


def _kind(x: Any) -> str:
    return f"shape {tuple(x.shape)}" if isinstance(x, Tensor) else type(x).__name__
