"""Which operations may be run on values that nobody computed, as trials of strides and of speed do.

A kernel believes what it is given: an index out of range, a workspace that its forward kernel did not fill, or a size
that is not the tensor's lets it read and write foreign memory. So what is not known to be safe is not run.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable

import torch
from torch import Tensor

from .._torch_compat import OpOverload, has_decomposition, packet_of

aten = torch.ops.aten
_DEFINED = {torch.Tag.core, torch.Tag.pointwise, torch.Tag.reduction}
_INDICES = (torch.int32, torch.int64)


def takes_any_values(op: OpOverload, tensors: Iterable[Tensor]) -> bool:
    """Return whether an operation may be run on tensors like these that hold zeros or, if floating, any numbers.

    It may if torch defines its result element by element (`is_defined`), and no tensor is opaque bytes: quantised
    values, a workspace, the state of a generator. Zeros are valid indices, if there is something to index.
    """
    given = list(tensors)
    if not is_defined(op) or any(x.layout is not torch.strided or x.is_quantized for x in given):
        return False
    whole = [x.dtype for x in given if not (x.is_floating_point() or x.is_complex() or x.dtype is torch.bool)]
    if torch.Tag.pointwise in op.tags or not whole:
        return True
    return all(x in _INDICES for x in whole) and all(x.numel() for x in given)


@functools.cache
def is_defined(op: OpOverload) -> bool:
    """Return whether an operation's result is defined by its tensors' elements alone.

    Torch says so with a tag (the core operations, elementwise ones and reductions) or a decomposition into such. A
    derivative takes what its operation takes and makes, so it is defined if that is.
    """
    return op.namespace == "aten" and (_says_so(op) or _says_so(_differentiated(op)))


def _says_so(op: OpOverload | None) -> bool:
    """Return whether torch defines an operation, in any overload."""
    if op is None:
        return False
    packet = packet_of(op)
    overloads = [getattr(packet, x) for x in packet.overloads()]
    return any(_DEFINED & set(x.tags) or has_decomposition(x) for x in overloads)


def _differentiated(op: OpOverload) -> OpOverload | None:
    """Return an overload of the operation whose derivative this is, by torch's names."""
    name = op._schema.name.split("::")[1]
    packet = getattr(aten, name.removesuffix("_backward"), None) if name.endswith("_backward") else None
    return None if packet is None else getattr(packet, packet.overloads()[0])
