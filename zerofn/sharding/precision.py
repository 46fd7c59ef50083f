"""The dtypes of parameters: as stored, as computed with, and as reduced."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..ops import formats as _formats  # noqa: F401  (defines zerofn::high)
from ..util.arguments import check_fields
from ..util.errors import nearest


@dataclass(frozen=True)
class Precision:
    """Dtypes of the stored parameter (the master), of computation, and of the reduction of gradients.

    `param=None` keeps each leaf's dtype, `compute=None` is the stored dtype, `reduce=None` is the compute dtype.
    Gradients accumulate over microbatches in the reduce dtype. A float32 parameter with `compute=bfloat16` is
    stored as a split master: its upper half is what is gathered and used, and both halves take 4 bytes.
    """

    param: torch.dtype | None = None
    compute: torch.dtype | None = None
    reduce: torch.dtype | None = None

    def __post_init__(self) -> None:
        check_fields(self)

    def computes(self, stored: torch.dtype) -> torch.dtype:
        """Return the dtype in which a parameter stored as `stored` is gathered and used."""
        return self.compute if self.compute is not None and stored.is_floating_point else stored

    def reduces(self, stored: torch.dtype) -> torch.dtype:
        """Return the dtype in which the gradient of a parameter stored as `stored` is reduced and accumulated."""
        return self.reduce if self.reduce is not None and stored.is_floating_point else self.computes(stored)

    def splits(self, stored: torch.dtype) -> bool:
        """Return whether a parameter stored as `stored` is a split master."""
        return stored is torch.float32 and self.computes(stored) is torch.bfloat16

    def narrow(self, shard: Tensor) -> Tensor:
        """Return a stored shard in the compute dtype. A split master is rounded to nearest, ties away from zero."""
        return torch.ops.zerofn.high(shard) if self.splits(shard.dtype) else shard.to(self.computes(shard.dtype))


NAMED = {
    "fp32": Precision(torch.float32, torch.float32, torch.float32),
    "bf16": Precision(torch.float32, torch.bfloat16, torch.float32),
    "fp16": Precision(torch.float32, torch.float16, torch.float32),
}


def resolve(precision: Precision | str | None) -> Precision:
    """Return the `Precision` that `shard` was asked for. Raises `ValueError` or `TypeError` that offers the nearest
    name.
    """
    if precision is None:
        return Precision()
    if isinstance(precision, Precision):
        return precision
    if isinstance(precision, str):
        if precision in NAMED:
            return NAMED[precision]
        near = nearest(precision, NAMED, 1, 0.0)
        raise ValueError(
            f"precision={precision!r} is not known; did you mean {near[0]!r}? "
            f"Known are {sorted(NAMED)} and zerofn.Precision(param, compute, reduce)."
        )
    names = ", ".join(map(repr, sorted(NAMED)))
    given = precision if isinstance(precision, torch.dtype) else type(precision).__name__
    raise TypeError(f"precision: expected None, {names} or a zerofn.Precision(param, compute, reduce), got {given}.")
