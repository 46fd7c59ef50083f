"""Fake kernels for operations whose own ones refuse what the real ones take."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .._torch_compat import register_fake

_ALIGNMENT = 16  # bytes: the rows of a grouped product begin at multiples of it


@register_fake(torch.ops.aten._grouped_mm.default)
def grouped_mm(
    mode: Any, func: Any, a: Tensor, b: Tensor, offs: Any = None, bias: Any = None, out_dtype: Any = None
) -> Any:
    """Return the result of `torch._grouped_mm`, whose own fake kernel knows bfloat16 alone.

    `a`: [m, k] or [groups, m, k]. `b`: [k, n] or [groups, k, n]. `offs`: where groups end, in the dim that is cut.
    """
    groups = [offs.shape[0]] if a.dim() == b.dim() == 2 else [a.shape[0]] if a.dim() == b.dim() else []
    m, n, dtype = a.shape[-2], b.shape[-1], out_dtype or a.dtype
    aligned = _ALIGNMENT // dtype.itemsize
    row = -(-n // aligned) * aligned
    with mode:
        return torch.empty_strided([*groups, m, n], [m * row] * len(groups) + [row, 1], dtype=dtype, device=a.device)
