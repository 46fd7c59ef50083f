"""Blocks of keys that a step itself chooses: an index tensor."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..util.arguments import checked


class Blocks(NamedTuple):
    """For each block of queries, the indices of the blocks of keys that it attends to. `chosen` makes one.

    >>> blocks = chosen(torch.tensor([0, 1]).view(1, 1, 2, 1), block=64)
    >>> blocks.block_q, blocks.block_k
    (64, 64)
    """

    numbers: Tensor
    block_q: int
    block_k: int


@checked()
def chosen(index: Tensor, block: int, *, queries: int | None = None) -> Blocks:
    """Return a layout for `attention` from an index of blocks, which the step computes, for example by `topk`.

    `index` int32 or int64 [batch, heads, blocks of queries, k], or with 1 for the batch or the heads: indices of blocks
    of keys. -1 means no block, and a repeated block counts once. `block`: number of tokens of a block of keys.
    `queries`: number of tokens of a block of queries, by default the same. The index has no gradient. Attention refuses
    an index of a block that does not exist; on a GPU an assertion of the device does, without a wait.

    Raises `TypeError` and `ValueError` for a wrong dtype or shape, and for blocks without a token.

    >>> blocks = chosen(torch.tensor([0, 1]).view(1, 1, 2, 1), block=64)  # each block of queries its own
    """
    if index.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"sparse.chosen: the index must be int32 or int64, got {index.dtype}.")
    if index.dim() != 4:
        raise ValueError(
            f"sparse.chosen: the index must be [batch, heads, blocks of queries, k], got {list(index.shape)}."
        )
    queries = block if queries is None else queries
    if block < 1 or queries < 1:
        raise ValueError(f"sparse.chosen: a block must have 1 token or more, got {min(block, queries)}.")
    return Blocks(index.detach(), queries, block)
