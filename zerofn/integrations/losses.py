"""Losses, and statistics of batch norm, in float32 where a model computes in half precision, as under autocast."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

# https://docs.pytorch.org/docs/stable/amp.html lists what autocasts to float32; these are its losses.
LOSSES = frozenset({
    F.cosine_embedding_loss, F.cross_entropy, F.binary_cross_entropy_with_logits, F.gaussian_nll_loss,
    F.hinge_embedding_loss, F.huber_loss, F.kl_div, F.l1_loss, F.margin_ranking_loss, F.mse_loss,
    F.multi_margin_loss, F.multilabel_margin_loss, F.multilabel_soft_margin_loss, F.nll_loss, F.poisson_nll_loss,
    F.smooth_l1_loss, F.soft_margin_loss, F.triplet_margin_loss,
})  # fmt: skip


class LossesInFloat32(TorchFunctionMode):
    """Inside, torch's losses take bfloat16 and float16 as float32, and batch norm its weights with its statistics."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in LOSSES:
            args, kwargs = [_float(x) for x in args], {k: _float(x) for k, x in kwargs.items()}
        elif func is F.batch_norm:  # all but what it normalizes
            args, kwargs = (
                [*args[:1], *map(_float, args[1:])],
                {k: _float(x) if k != "input" else x for k, x in kwargs.items()},
            )
        return func(*args, **kwargs)


def _float(x: Any) -> Any:
    half = isinstance(x, Tensor) and x.dtype in (torch.bfloat16, torch.float16)
    return x.float() if half else x
