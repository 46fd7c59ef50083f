"""Layers that are cut over a mesh: slices of weights for each rank, and the maps between them, in unmodified models."""

from .plan import Slice
from .tensor_parallel import tensor

__all__ = ["Slice", "tensor"]


def __dir__() -> list[str]:
    return list(__all__)
