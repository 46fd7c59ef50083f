"""Layers that are cut over a mesh: slices of weights for each rank, and the maps between them, in unmodified models."""

from .plan import Slice
from .tensor import tensor

__all__ = ["Slice", "tensor"]
