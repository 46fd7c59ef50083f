"""Attention at the cost of the blocks that are attended: patterns, layouts, and models that use them.

    recent = (sparse.sinks(4) | sparse.sliding_window(1024)) & sparse.causal
    out = sparse.attention(q, k, v, recent)

Words:

- *pattern*: which keys a query attends to, as a function of positions (`patterns.py`). For a tile of 64 queries and
  64 keys, a pattern says whether none, some or all pairs are attended. It is asked about single tokens only where the
  answer is "some".
- *layout*: the form of a pattern that the kernel reads (`layout.py`): for each block of queries the runs of keys, and
  a word of bits for each key of a tile that is attended in part.
- *documents*: a span of keys for each query, [rows, tokens, 2], which a step may compute from its batch.
- *blocks*: an index tensor of blocks that a step chooses itself (`blocks.py`).

Layouts, documents and blocks are arguments of one operation (`zerofn/ops/block_attention.py`), whose flops are
counted from the tiles.

How a model uses it: `sparse.use` replaces `forward` of the modules whose methods name attention. While such a module
runs, a `TorchFunctionMode` replaces `scaled_dot_product_attention`. So layers that are recomputed in the backward pass
follow the layout, copies of the model do too, and other models are untouched. A module that returns without having
called attention has computed it by other means; that is an error, since the layout would have no effect.

Start reading: `patterns.py`, then `layout.py` and `attention.py`.
"""

from typing import TYPE_CHECKING

from ..util.names import of_package
from . import deepspeed
from .attention import attention
from .blocks import Blocks, chosen
from .layout import Layout, layout
from .patterns import Pattern, causal, everything, pattern, prefix, sinks, sliding_window
from .rows import documents, padding
from .use import use

__all__ = [
    "attention",
    "causal",
    "chosen",
    "deepspeed",
    "documents",
    "everything",
    "layout",
    "padding",
    "pattern",
    "prefix",
    "sinks",
    "sliding_window",
    "use",
    "Blocks",
    "Layout",
    "Pattern",
]


if not TYPE_CHECKING:
    __getattr__, __dir__ = of_package(__name__, __all__)
