"""Constants: values that cannot change, which a captured step may hold and a signature compares."""

from __future__ import annotations

import datetime
import decimal
import enum
import fractions
import pathlib
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn

from .._torch_compat import FakeTensor

# Equal ones of one of these types are the same in every respect.
EQUAL = frozenset({
    int, bool, str, bytes, type(None), type(...), torch.dtype, torch.device, torch.layout, torch.memory_format,
})  # fmt: skip
# Of these types equal ones may differ: 0.0 and -0.0, Decimal("1") and Decimal("1.0"), range(0, 3, 2) and
# range(0, 4, 2); and nan differs from itself.
TOLD_BY: dict[type, Callable[[Any], Any]] = {
    float: float.hex,
    complex: lambda x: (x.real.hex(), x.imag.hex()),
    torch.Size: tuple,
    tuple: lambda x: tuple(map(key_of, x)),
    frozenset: lambda x: frozenset(map(key_of, x)),
    slice: lambda x: (key_of(x.start), key_of(x.stop), key_of(x.step)),
    **dict.fromkeys((range, decimal.Decimal, fractions.Fraction, datetime.timedelta, datetime.date), repr),
    **dict.fromkeys((pathlib.PurePosixPath, pathlib.PosixPath, datetime.datetime, datetime.time), repr),
}


# Tensors that do what their operations do. Other classes may have operations of their own.
PLAIN_TENSORS = frozenset({torch.Tensor, torch.nn.Parameter, torch.nn.Buffer, FakeTensor})


class NotConstant(TypeError):
    """A value may change while it stays the same object, or hold what does."""


def key_of(x: Any) -> Any:
    """Return what two constants have alike if, and only if, a step cannot tell one from the other; it is hashable.

    Raises `NotConstant` for a value that is not a constant: an object of a class of the user's, whatever its own
    `__eq__` and `__hash__` say, a function, a module.

    >>> key_of(0.0) == key_of(-0.0), key_of(1) == key_of(True), key_of(float("nan")) == key_of(float("nan"))
    (False, False, True)
    """
    kind = type(x)
    if kind in EQUAL:
        return kind, x
    if kind in TOLD_BY:
        return kind, TOLD_BY[kind](x)
    if isinstance(x, enum.Enum):
        return kind, id(x)  # its class, which keeps it alive, has each member once
    if isinstance(x, np.generic) and not x.dtype.hasobject:
        return kind, x.dtype.str, x.tobytes()
    if isinstance(x, np.dtype):
        return np.dtype, x
    raise NotConstant(kind.__name__)


def is_constant(x: Any) -> bool:
    """Return whether a value cannot change."""
    try:
        key_of(x)
    except NotConstant:
        return False
    return True


def constant_attributes(x: Any) -> tuple[tuple[str, Any], ...]:
    """Return (name, key) of the attributes that somebody has set on an object and that are constants."""
    return tuple((name, key_of(value)) for name, value in vars(x).items() if is_constant(value))


def special_values(x: torch.Tensor) -> str:
    """Return what is special about a tensor whose elements are not plainly in its memory, and what to give instead; ""
    for others.

    >>> special_values(torch.ones(2).to_mkldnn())
    "has oneDNN's layout: pass x.to_dense()"
    """
    if isinstance(x, FakeTensor):
        return ""
    if stores_its_own_way(type(x)):
        return QUANTISED.format(type(x).__name__)
    if x.is_quantized:
        return "is a quantised tensor: pass x.dequantize(), or its integers, x.int_repr(), and its scale"
    if x.is_mkldnn:
        return "has oneDNN's layout: pass x.to_dense()"
    if x.is_meta:
        return 'is on "meta", which has a shape but no values: pass a tensor on a device'
    return ""


QUANTISED = (
    "is a {}, a class of quantised parameters, but only plain tensors can be sharded. Build the model without "
    "quantisation (no quantization_config; nn.Linear). A frozen model in bfloat16 is sharded over the ranks at stage 3"
)


def stores_its_own_way(kind: type) -> bool:
    """Whether a class of parameters says what becomes of its memory when it is moved, as bitsandbytes' do."""
    if not issubclass(kind, nn.Parameter) or kind is nn.Parameter:
        return False
    above = set(nn.Parameter.__mro__)
    return any(name in vars(k) for k in kind.__mro__ if k not in above for name in ("to", "cpu", "cuda"))
