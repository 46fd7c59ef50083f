"""Layers and sequences that are cut over a mesh, in unmodified models: slices of weights, parts of sequences, and the
maps between them.
"""

from .attention import attention
from .balance import balanced_chunks
from .chunks import Chunks
from .context import context
from .cross_entropy import cross_entropy
from .pipe import pipe
from .plan import Slice
from .sequence import split_sequence
from .tensor_parallel import tensor
from .tiled_loss import tiled_loss

__all__ = [
    "attention",
    "balanced_chunks",
    "context",
    "cross_entropy",
    "pipe",
    "split_sequence",
    "tensor",
    "tiled_loss",
    "Chunks",
    "Slice",
]


def __dir__() -> list[str]:
    return list(__all__)
