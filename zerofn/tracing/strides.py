"""The strides that operations really give their results, where fake ones promise others.

A fake kernel tells a result's shape from a formula, and some formulas forget the strides: `elu` of a transposed tensor
keeps its strides, and its fake result is contiguous. A capture would then leave out a copy that is needed, or take a
view that is not there. So an operation on tensors that are not contiguous runs once on small tensors with the same
order of strides, real and fake. Where both agree the promise holds; elsewhere the real order is used. What might not
bear invented values (`invented_values.py`) is not tried.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from .._torch_compat import FakeTensor, below_autograd, outside_trace, without_dispatch_modes
from ..util.nested_arguments import tensors_in, with_tensors
from .invented_values import takes_any_values

_KEPT = 16  # sizes up to here stay: kernels of a convolution, groups
_MOST = 1 << 22  # elements of all arguments together, for a trial at full size
Layout = tuple[tuple[int, ...], tuple[int, ...]]  # shape, strides


def is_suspect(func: Any, tensors: Sequence[Tensor]) -> bool:
    """Return whether an operation's promise of strides needs a trial."""
    drawn = torch.Tag.nondeterministic_seeded in func.tags
    reordered = any(x.dim() > 1 and not x.is_contiguous() for x in tensors)
    return reordered and not drawn and takes_any_values(func, tensors)


def real_strides(func: Any, args: Any, kwargs: Any, promised: Any) -> list[tuple[int, ...] | None]:
    """Return the strides of each result of an operation; None for one whose promise holds or could not be tried.

    `args`, `kwargs`: fake. `promised`: the fake result.
    """
    results = [x if isinstance(x, Tensor) else None for x in _several(promised)]
    small = _small_sizes(tensors_in((args, kwargs)))
    fits = torch.Tag.pointwise in func.tags or all(n <= _KEPT or n in small for n in _ints_in((args, kwargs)))
    for sizes in (small, None) if fits else (None,):
        trial = _Trial(sizes)
        try:
            fake, real = trial.run(func, args, kwargs)
        except Exception:  # sizes that do not fit together: try the real ones
            continue
        if len(fake) == len(real) == len(results):
            return [
                None if x is None or b is None or a == b else _in_order(tuple(x.shape), b)
                for x, a, b in zip(results, fake, real, strict=True)
            ]
    return [None] * len(results)


def _several(result: Any) -> list[Any]:
    return list(result) if isinstance(result, list | tuple) else [result]


def _small_sizes(tensors: Iterator[Tensor]) -> dict[int, int]:
    """Map large sizes to small ones: equal ones stay equal, others different, multiples of 16 such."""
    large = sorted({n for x in tensors for n in x.shape if n > _KEPT})
    return {n: _KEPT * (k + 1) + (1 if n % _KEPT else 0) for k, n in enumerate(large)}


def _ints_in(value: Any) -> Iterator[int]:
    """All integers among an operation's arguments: counts, sizes, dims and indices, unless it is elementwise."""
    if isinstance(value, dict | list | tuple):
        for x in value.values() if isinstance(value, dict) else value:
            yield from _ints_in(x)
    elif type(value) is int:
        yield value


class _Trial:
    """One run of an operation on zeros, fake and real. `sizes`: large -> small ones; None for full size."""

    def __init__(self, sizes: dict[int, int] | None) -> None:
        self.shrink: Callable[[int], int] | None = None if sizes is None else lambda n: sizes.get(n, n)

    def run(self, func: Any, args: Any, kwargs: Any) -> tuple[list[Any], list[Any]]:
        """Return the strides of fake and of real results. Raises whatever the operation raises."""
        if self.shrink is None and sum(x.numel() for x in tensors_in((args, kwargs))) > _MOST:
            raise ValueError("too large for a trial")
        mode = next(x.fake_mode for x in tensors_in((args, kwargs)) if isinstance(x, FakeTensor))
        with torch.no_grad(), below_autograd():
            with outside_trace(), mode:
                fake = self._strides(func, args, kwargs)
            with without_dispatch_modes():
                real = self._strides(func, args, kwargs)
        return fake, real

    def _strides(self, func: Any, args: Any, kwargs: Any) -> list[Any]:
        out = func(*with_tensors(self._ints(args), self._like), **with_tensors(self._ints(kwargs), self._like))
        return [x.stride() if isinstance(x, Tensor) else None for x in _several(out)]

    def _ints(self, value: Any) -> Any:
        """Shrink sizes, such as a norm's shape."""
        if self.shrink is None:
            return value
        if isinstance(value, dict):
            return {k: self._ints(v) for k, v in value.items()}
        if isinstance(value, tuple | list):
            return type(value)(map(self._ints, value))
        return self.shrink(value) if type(value) is int else value

    def _like(self, x: Tensor) -> Tensor:
        shape, strides = tuple(x.shape), x.stride()
        if self.shrink is not None:
            shape, strides = _shrunk(shape, strides, self.shrink)
        extent = 1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True)) if math.prod(shape) else 0
        return torch.zeros(extent, dtype=x.dtype, device=x.device).as_strided(shape, strides)


def _shrunk(shape: Sequence[int], strides: Sequence[int], shrink: Callable[[int], int]) -> Layout:
    """Return a small layout with the order, the gaps and the repetitions of this one. Raises `ValueError` for elements
    that overlap otherwise.
    """
    sizes = tuple(map(shrink, shape))
    out = list(strides)
    dense = small = 1
    for d in sorted(range(len(shape)), key=lambda d: (strides[d], shape[d])):
        if strides[d] == 0:
            continue
        if strides[d] < dense and shape[d] > 1:
            raise ValueError("elements overlap")
        out[d] = small if strides[d] <= dense else 2 * small
        dense, small = max(dense, strides[d] * shape[d]), max(small, out[d] * sizes[d])
    return sizes, tuple(out)


def _in_order(shape: tuple[int, ...], strides: Sequence[int]) -> tuple[int, ...]:
    """Return dense strides of a shape, in the order of `strides`."""
    out = [1] * len(shape)
    dense = 1
    for d in sorted(range(len(shape)), key=lambda d: (strides[d], shape[d] != 1, -d)):
        out[d] = dense
        dense *= shape[d]
    return tuple(out)
