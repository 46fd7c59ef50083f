"""Normal noise for leaves, drawn in blocks at fixed places, so that a shard gets its own part of one whole draw."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..ops.registry import OnShard, Traits, define
from .draws import _fold

BLOCK = 1 << 14  # elements: drawing a block takes far longer than seeding its generator


def _block(seed: int, k: int, numel: int, like: Tensor) -> Tensor:
    """Return the k-th block of the noise of a leaf of `numel` elements, in the dtype in which it is drawn."""
    dtype = torch.promote_types(like.dtype, torch.float32)
    # Always the whole block: the host's generator pairs elements by the length of what it fills.
    drawn = torch.empty(min(BLOCK, numel - k * BLOCK), dtype=dtype, device=like.device)
    return drawn.normal_(generator=torch.Generator(like.device).manual_seed(_fold(seed, k)))


def _part(key: Tensor, leaf: int, numel: int, first: int, out: Tensor) -> None:
    """Fill `out` with elements [first, first + len(out)) of the noise of the `leaf`-th leaf, of `numel` elements."""
    seed, stop = _fold(int(key), leaf), first + out.numel()
    for k in range(first // BLOCK, -(-stop // BLOCK)):
        drawn, begin = _block(seed, k, numel, out), k * BLOCK
        a, b = max(begin, first), min(begin + len(drawn), stop)
        out[a - first : b - first] = drawn[a - begin : b - begin]


def _rows(
    key: Tensor, leaf: int, numel: int, first: int, length: int, count: int, step: int, stride: int, out: Tensor
) -> None:
    """Fill `count` runs of `length` elements, every `stride` of `out`, with those from `first` on, every `step` of the
    leaf.
    """
    seed, stop = _fold(int(key), leaf), first + (count - 1) * step + length
    for k in range(first // BLOCK, -(-stop // BLOCK)):
        begin, end = k * BLOCK, min((k + 1) * BLOCK, stop)
        last = (end - 1 - first) // step  # the last run that begins before the block ends
        if first + last * step + length <= begin:
            continue
        drawn = _block(seed, k, numel, out)[: end - begin]
        at = torch.arange(begin - first, end - first, device=out.device)
        row, column = at.div(step, rounding_mode="floor"), at.remainder(step)
        wanted = (row >= 0) & (column < length)
        out[(row * stride + column)[wanted]] = drawn[wanted].to(out.dtype)


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


def normal_slices(
    key: Tensor,
    like: Tensor,
    leaves: Sequence[int],
    numels: Sequence[int],
    firsts: Sequence[int],
    starts: Sequence[int],
    lengths: Sequence[int],
    counts: Sequence[int],
    steps: Sequence[int],
    strides: Sequence[int],
) -> Tensor:
    """Return a shard of slices of leaves, like `like`: its elements [starts[i], starts[i] + lengths[i]) are those of
    leaf `leaves[i]` from `firsts[i]` on, and so on, `counts[i]` times, every `strides[i]` and every `steps[i]`.
    The gaps are zeros.
    """
    out = torch.zeros(like.shape, dtype=like.dtype, device=like.device)
    runs = zip(leaves, numels, firsts, starts, lengths, counts, steps, strides, strict=True)
    for leaf, numel, first, start, length, count, step, stride in runs:
        if count == 1:
            _part(key, leaf, numel, first, out[start : start + length])
        else:
            _rows(key, leaf, numel, first, length, count, step, stride, out[start:])
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
define(
    "normal_slices(Tensor key, Tensor like, int[] leaves, int[] numels, int[] firsts, int[] starts, int[] lengths, "
    "int[] counts, int[] steps, int[] strides) -> Tensor",
    normal_slices,
    lambda key, like, *rest: like.new_empty(like.shape),
    traits=Traits(OnShard.MAKES),
)
