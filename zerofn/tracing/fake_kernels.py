"""Fake kernels for operations that have none, or whose own ones refuse what the real ones take or escape a trace."""

from __future__ import annotations

import functools
import warnings
from typing import Any

import torch
from torch import Tensor

from .._torch_compat import DynamicShapeError, register_fake

aten = torch.ops.aten
_VIEWS = "view", "as_strided", "_reshape_alias"  # those that torch runs on zeros without asking a mode
_ALIGNMENT = 16  # bytes: the rows of a grouped product begin at multiples of it


@register_fake(aten._grouped_mm.default)
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


@register_fake(aten.linalg_lstsq.default)
def lstsq(mode: Any, func: Any, a: Tensor, b: Tensor, rcond: Any = None, *, driver: str | None = None) -> Any:
    """Return (solution, residuals, rank, singular values).

    `a`: [*, m, n]. `b`: [*, m, k] or [*, m]. Raises where the shape of the residuals depends on the rank of `a`.
    """
    *batch, m, n = a.shape
    columns = b.shape[-1] if a.dim() == b.dim() else 1
    driver = driver or ("gelsy" if a.device.type == "cpu" else "gels")
    by_singular_values = driver in ("gelsd", "gelss")
    if m > n and by_singular_values:
        raise DynamicShapeError(func)
    with mode:
        solution = b.new_empty(*batch, columns, max(m, n)).mT.narrow(-2, 0, n)
        real = a.real if a.is_complex() else a
        return (
            solution if a.dim() == b.dim() else solution.squeeze(-1),
            real.new_empty(*batch, columns) if m > n and driver == "gels" else real.new_empty(0),
            a.new_empty([0] if driver == "gels" else batch, dtype=torch.int64),
            real.new_empty(*batch, min(m, n)) if by_singular_values else real.new_empty(0),
        )


@functools.cache
def see_views_of_zeros() -> torch.library.Library:
    """Let modes see all views of forward-mode differentiation's immutable zeros, from now on.

    Torch has kernels of its own for some, above all modes. They make a plain tensor on "meta" of a fake one, and what
    is added to that moves to "meta", too. Without them the general kernels run, which make the same of a real zero.
    """
    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of a kernel that is replaced
        for name in _VIEWS:
            library.impl(name, torch.library.fallthrough_kernel, "ZeroTensor")
    return library  # as long as it lives, they are replaced
