"""Losses, and statistics of batch norm, in float32 where a model computes in half precision, as under autocast."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
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


NORMS = frozenset({F.group_norm, F.layer_norm, F.rms_norm})


class LossesInFloat32(TorchFunctionMode):
    """Inside, torch's losses take bfloat16 and float16 as float32, batch norm takes its weights with its statistics,
    and other norms take them in the dtype of what they normalize.
    """

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
        elif func in NORMS:
            dtype = (args[0] if args else kwargs["input"]).dtype
            args, kwargs = [_to(x, dtype) for x in args], {k: _to(x, dtype) for k, x in kwargs.items()}
        return func(*args, **kwargs)


@contextlib.contextmanager
def as_autocast(device: torch.device, dtype: torch.dtype | None) -> Iterator[None]:
    """Inside, a model whose parameters are in half precision, `dtype`, computes as under `torch.autocast`; in its own
    dtypes if it is None.
    """
    with contextlib.ExitStack() as stack:
        if dtype is not None:
            stack.enter_context(torch.autocast(device.type, dtype))
            stack.enter_context(LossesInFloat32())
        yield


def _to(x: Any, dtype: torch.dtype) -> Any:
    return x.to(dtype) if isinstance(x, Tensor) and x.dtype in (torch.bfloat16, torch.float16) else x


def _float(x: Any) -> Any:
    half = isinstance(x, Tensor) and x.dtype in (torch.bfloat16, torch.float16)
    return x.float() if half else x
