"""Normal noise for leaves, drawn in blocks at fixed places, so that a shard gets its own part of one whole draw."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..ops.registry import OnShard, Traits, define
from .draws import _fold

BLOCK = 1 << 14  # elements: drawing a block takes far longer than seeding its generator


def _part(key: Tensor, leaf: int, numel: int, first: int, out: Tensor) -> None:
    """Fill `out` with elements [first, first + len(out)) of the noise of the `leaf`-th leaf, of `numel` elements."""
    seed, dtype = _fold(int(key), leaf), torch.promote_types(out.dtype, torch.float32)
    stop = first + out.numel()
    for k in range(first // BLOCK, -(-stop // BLOCK)):
        begin = k * BLOCK
        # Always the whole block: the host's generator pairs elements by the length of what it fills.
        drawn = torch.empty(min(BLOCK, numel - begin), dtype=dtype, device=out.device)
        drawn.normal_(generator=torch.Generator(out.device).manual_seed(_fold(seed, k)))
        a, b = max(begin, first), min(begin + len(drawn), stop)
        out[a - first : b - first] = drawn[a - begin : b - begin]


def normal_leaf(key: Tensor, like: Tensor, leaf: int) -> Tensor:
    """Return the noise of the `leaf`-th leaf, in the shape, dtype and on the device of `like`."""
    out = torch.empty(like.numel(), dtype=like.dtype, device=like.device)
    _part(key, leaf, like.numel(), 0, out)
    return out.view(like.shape)


def normal_shard(
    key: Tensor,
    like: Tensor,
    leaves: Sequence[int],
    numels: Sequence[int],
    firsts: Sequence[int],
    starts: Sequence[int],
    stops: Sequence[int],
) -> Tensor:
    """Return a shard like `like`: its elements [starts[i], stops[i]) are those of leaf `leaves[i]` from `firsts[i]` on.
    The gaps between leaves are zeros.
    """
    out = torch.zeros(like.shape, dtype=like.dtype, device=like.device)
    for leaf, numel, first, start, stop in zip(leaves, numels, firsts, starts, stops, strict=True):
        _part(key, leaf, numel, first, out[start:stop])
    return out


define(
    "normal_leaf(Tensor key, Tensor like, int leaf) -> Tensor",
    normal_leaf,
    lambda key, like, leaf: like.new_empty(like.shape),
    traits=Traits(OnShard.REFUSED),
)
define(
    "normal_shard(Tensor key, Tensor like, int[] leaves, int[] numels, int[] firsts, int[] starts, int[] stops) "
    "-> Tensor",
    normal_shard,
    lambda key, like, *rest: like.new_empty(like.shape),
    traits=Traits(OnShard.MAKES),
)
