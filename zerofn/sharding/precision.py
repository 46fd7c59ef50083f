"""The dtypes of parameters: as stored, as computed with, as reduced, and as sent."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from ..comm.mesh import Axis
from ..ops import formats as _formats  # noqa: F401  (defines zerofn::high)
from ..util.arguments import check_fields, known_fields, told
from ..util.errors import nearest
from . import wire as wires
from .float8 import Fp8
from .wire import STOCHASTIC, Wire, WireWord

PrecisionWord = Literal["fp32", "bf16", "fp16", "fp8"]


@known_fields
@dataclass(frozen=True)
class Precision:
    """Dtypes of the stored parameter (the master), of computation, and of the reduction of gradients.

    `param=None` keeps each leaf's dtype, `compute=None` is the stored dtype, `reduce=None` is the compute dtype.
    Gradients accumulate over microbatches in the reduce dtype. A float32 parameter with `compute=bfloat16` is stored as
    a split master: the upper half, a bfloat16, is gathered and used, and both halves need 4 bytes.

    `wire`: the codec for parameters and gradients that ranks send, as for `zerofn.shard`. Masters and moments stay
    exact.

    - Steps compute with the decoded values of sharded parameters (with "bf16", `p.bfloat16().float()`). This includes a
      rank's own shard, and stage 0, which sends no parameters.
    - Each rank encodes its gradients once, and the rank that holds the shard adds them in float32, in rank order. With
      an axis `replicate`, these sums are encoded again, and added along it.
    - Sums that ranks gather afterwards stay in float32: at stage 0, and along `replicate` without hpz. So every stage
      gives the same bits.

    Derivatives of transfers ignore the rounding. With one rank, nothing is sent or rounded.

    `fp8`: which linear layers multiply in float8. Their inputs and outputs are bfloat16.

    Raises `ValueError` for an unknown `wire`, for a `wire` that contradicts `Fp8(gather=True)`, and for `fp8` without
    `compute=torch.bfloat16`; `TypeError` if `fp8` is not an `Fp8`.

    >>> bf16 = Precision(torch.float32, torch.bfloat16, torch.float32)  # precision="bf16"
    >>> bf16.computes(torch.float32), bf16.reduces(torch.float32)
    (torch.bfloat16, torch.float32)
    """

    param: torch.dtype | None = None
    compute: torch.dtype | None = None
    reduce: torch.dtype | None = None
    wire: WireWord | Wire | Mapping[str, WireWord | Wire | None] | None = None
    fp8: Fp8 | None = None

    def __post_init__(self) -> None:
        check_fields(self)
        object.__setattr__(self, "wire", wires.given(self.wire))
        if not isinstance(self.fp8, Fp8 | None):
            raise TypeError(
                f"Precision: fp8 must be a zerofn.Fp8 or None, got {told(self.fp8)}. Write fp8=zerofn.Fp8() for all "
                "linear layers except heads, fp8=zerofn.Fp8(where) for the layers whose weight's name makes `where` "
                "return True, or leave fp8 out."
            )
        if self.fp8 is not None and self.compute is not torch.bfloat16:
            raise ValueError(
                f"Precision(compute={self.compute}, fp8=...): with float8 products, all other operations must compute "
                "in bfloat16. Write Precision(torch.float32, torch.bfloat16, torch.float32, fp8=zerofn.Fp8()), which "
                "is precision='fp8'."
            )

        if self.fp8 is not None and self.fp8.gather and any(x.gather for x in self._wires()):
            raise ValueError(
                "Precision: both wire and Fp8(gather=True) say in which form parameters are gathered. Leave one of "
                "them out, or write zerofn.Wire(reduce=...), which changes reductions only."
            )

    def _wires(self) -> list[Wire]:
        found = wires.given(self.wire)
        return [found] if isinstance(found, Wire) else list(found.values()) if found is not None else []

    def computes(self, stored: torch.dtype) -> torch.dtype:
        """Return the dtype in which a parameter stored as `stored` is gathered and used."""
        return self.compute if self.compute is not None and stored.is_floating_point else stored

    def reduces(self, stored: torch.dtype) -> torch.dtype:
        """Return the dtype in which the gradient of a parameter stored as `stored` is reduced and accumulated."""
        return self.reduce if self.reduce is not None and stored.is_floating_point else self.computes(stored)

    def wire_along(self, axis: Axis) -> Wire | None:
        """Return the codec in which units are sent along an axis."""
        return wires.along(wires.given(self.wire), axis)

    def draws_along(self, axis: Axis) -> bool:
        """Return whether gradients are rounded stochastically along an axis."""
        wire = self.wire_along(axis)
        return wire is not None and wire.rounding == STOCHASTIC

    @property
    def draws(self) -> bool:
        """Whether gradients are rounded stochastically along any axis."""
        return any(x.rounding == STOCHASTIC for x in self._wires())

    @property
    def feeds_back(self) -> bool:
        """Whether rounding errors of gradients are stored and added to the next gradients."""
        return any(x.feedback for x in self._wires())

    def splits(self, stored: torch.dtype) -> bool:
        """Return whether a parameter stored as `stored` is a split master."""
        return stored is torch.float32 and self.computes(stored) is torch.bfloat16

    def narrow(self, shard: Tensor) -> Tensor:
        """Return a stored shard in the compute dtype. A split master is rounded to nearest, ties away from zero."""
        return torch.ops.zerofn.high(shard) if self.splits(shard.dtype) else shard.to(self.computes(shard.dtype))


NAMED: dict[str, Precision] = {
    "fp32": Precision(torch.float32, torch.float32, torch.float32),
    "bf16": Precision(torch.float32, torch.bfloat16, torch.float32),
    "fp16": Precision(torch.float32, torch.float16, torch.float32),
    "fp8": Precision(torch.float32, torch.bfloat16, torch.float32, fp8=Fp8()),
}


def resolve(precision: Precision | str | None, wire: Any = None) -> Precision:
    """Return the `Precision` that `shard` was asked for, with the codec of `wire=`. Raises `ValueError` or `TypeError`
    that offers the nearest name, and `ValueError` for two codecs.
    """
    if wire is not None:
        found, wire = resolve(precision), wires.given(wire)
        if found.wire not in (None, wire):
            raise ValueError(
                f"shard: the wire codec is given twice: wire={wire!r} is an argument of shard, and precision= contains "
                f"wire={found.wire!r}. Leave one of them out."
            )
        return replace(found, wire=wire)
    if precision is None:
        return Precision()
    if isinstance(precision, Precision):
        return precision
    if isinstance(precision, str):
        if precision in NAMED:
            return NAMED[precision]
        near = nearest(precision, NAMED, 1, 0.0)
        raise ValueError(
            f"precision={precision!r} is not known; did you mean {near[0]!r}? Write one of {sorted(NAMED)} or "
            "zerofn.Precision(param, compute, reduce)."
        )
    names = ", ".join(map(repr, sorted(NAMED)))
    given = precision if isinstance(precision, torch.dtype) else type(precision).__name__
    raise TypeError(f"precision: expected None, {names} or a zerofn.Precision(param, compute, reduce), got {given}.")


def made_for(precision: Precision | str | None, wire: Any) -> Precision:
    """Return the precision for which a state is made: with a wire if what codes leave out is a part of it."""
    found = resolve(precision, wire)
    return found if found.feeds_back else resolve(precision)
