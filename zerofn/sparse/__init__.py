"""Attention at the cost of the blocks that are attended: masks that are layouts, and what makes them.

recent = (sparse.sinks(4) | sparse.sliding_window(1024)) & sparse.causal
out = sparse.attention(q, k, v, recent)
"""

from . import deepspeed
from .attention import attention
from .blocks import Blocks, chosen
from .layout import Layout, layout
from .patterns import Pattern, causal, documents, everything, pattern, prefix, sinks, sliding_window
from .use import use

__all__ = [
    "attention",
    "causal",
    "chosen",
    "deepspeed",
    "documents",
    "everything",
    "layout",
    "pattern",
    "prefix",
    "sinks",
    "sliding_window",
    "use",
    "Blocks",
    "Layout",
    "Pattern",
]


def __dir__() -> list[str]:
    return sorted(__all__)
