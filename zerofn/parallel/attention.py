"""Attention over sequences that are split along an axis of ranks, as plain functions.

A rank has two chunks of each sequence: of 2 * size chunks, rank r has the chunks r and 2 * size - 1 - r ("zigzag").
Under a causal mask late chunks need more work than early ones, so with one of each all ranks have equal work. `Chunks`
describes other ways to distribute chunks to ranks.

`ulysses`: ranks exchange sequences for heads, so that each rank has whole sequences of some heads (DeepSpeed-Ulysses,
arXiv:2309.14509). `ring`: blocks of keys and values go round, and each rank adds up what the blocks contribute,
relative to the greatest score so far (ring attention, arXiv:2310.01889). With a layout, `ring` sends a rank only the
blocks of keys that its queries attend to (`key_blocks.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from ..collectives.maps import Exchange, Linear, Permute
from ..comm.axes import CONTEXT
from ..comm.current_mesh import axis_of, works_by_rank
from ..comm.mesh import Axis
from ..sparse.attention import What, check_part, pattern_of, with_logsumexp
from ..sparse.blocks import Blocks
from ..sparse.described import described
from ..sparse.layout import Layout
from ..sparse.part import Part
from ..sparse.patterns import Sizes, everything
from ..training.remat import remat
from ..util.arguments import checked
from .chunks import Chunks, chunks_for
from .key_blocks import of_blocks

Method = Literal["ulysses", "ring"]
METHODS = get_args(Method)


@dataclass(frozen=True)
class SequencesOfHeads:
    """[..., H, s, D] on each rank, its chunks of all heads -> [..., H / size, size * s, D], whole sequences of its
    heads. `purpose`: as for `Exchange`.
    """

    axis: Axis
    chunks: Chunks
    purpose: str

    @property
    def transpose(self) -> HeadsOfChunks:
        """The map in the other direction: the map only moves elements."""
        return HeadsOfChunks(self.axis, self.chunks, self.purpose)

    def __call__(self, x: Tensor) -> tuple[Tensor]:
        """Exchange once, and put the chunks in order."""
        rows = x.unflatten(-3, (self.axis.size, -1)).movedim(-4, 0)
        return (self.chunks.whole(_exchanged(rows, self.axis, self.purpose), -2),)


@dataclass(frozen=True)
class HeadsOfChunks:
    """[..., H / size, size * s, D] on each rank, whole sequences of its heads -> [..., H, s, D], its chunks of all
    heads. `purpose`: as for `Exchange`.
    """

    axis: Axis
    chunks: Chunks
    purpose: str

    @property
    def transpose(self) -> SequencesOfHeads:
        """The map in the other direction: the map only moves elements."""
        return SequencesOfHeads(self.axis, self.chunks, self.purpose)

    def __call__(self, x: Tensor) -> tuple[Tensor]:
        """Sort the chunks by rank, and exchange once."""
        return (_exchanged(self.chunks.parts(x, -2), self.axis, self.purpose).movedim(0, -4).flatten(-4, -3),)


def _exchanged(rows: Tensor, axis: Axis, purpose: str) -> Tensor:
    return Exchange(axis, purpose)(rows.reshape(axis.size, -1))[0].view(rows.shape)


@checked("q", "k", "v", "axis", "method", "causal", "scale", "mask", "chunks")
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    axis: str | Axis = CONTEXT,
    method: Method = "ulysses",
    causal: bool = True,
    scale: float | None = None,
    mask: Tensor | None = None,
    layout: What | None = None,
    chunks: Chunks | None = None,
) -> Tensor:
    """Attention of a rank's part of each sequence to the whole sequence.

    `q` [B, H, s, D], `k` [B, G, s, D], `v` [B, G, s, E]: floating; the rank's part of each sequence, as
    `split_sequence` splits it. There are G key and value heads, where G divides H. `axis`: the ranks that share
    sequences. `method`: "ulysses" makes two exchanges and calls torch's own attention; the number of ranks must divide
    H. "ring" works for any number of heads. `causal`: whether a token attends only to earlier tokens and itself.
    `scale`: of the scores, by default D ** -0.5. `mask` [..., S, S] of booleans: replaces `causal`, and says to which
    tokens each token of the whole sequence attends, the same for all heads; only with "ulysses". `layout`: to which
    keys a query attends, besides `causal`, as for `zerofn.sparse.attention`. Its positions are those of the whole
    sequence, its heads those of all ranks, and it must be the same on all ranks. In a ring, a rank then receives only
    the blocks of keys to which its queries attend by the pattern. Documents that are part of the batch
    (`sparse.documents`) are masked, and do not change what is sent. `chunks`: the chunks that `split_sequence` was
    called with; by default an early and a late one for each rank.

    -> [B, H, s, E] in the dtype of `q`. All ranks must call it.

    Raises `ValueError` for heads that ranks cannot divide, for an s that the chunks do not divide, for a mask of the
    wrong shape, for a mask in a ring, for a mask together with a layout, for an unknown method, for an axis that does
    not exist, and in a ring for blocks that the step chooses and for a `sparse.Layout`.

    >>> x = torch.randn(1, 2, 4, 8)
    >>> attention(x, x, x, axis="data").shape
    torch.Size([1, 2, 4, 8])
    """
    where = axis_of(axis)
    dealt = chunks_for(where.size, chunks, "attention")
    _check(q, k, where, method, dealt)
    if mask is not None:
        _check_mask(mask, where.size * q.shape[-2], method, where)
    if layout is not None:
        _check_layout((q, k, v), layout, mask, method, where)
    if where.size == 1:
        return _whole(q, k, v, causal, scale, mask, layout)
    if method == "ring" and layout is None and dealt != Chunks.early_and_late(where.size):
        layout = everything
    purpose = _purpose(causal, scale, mask, layout, dealt)
    if method == "ring" and layout is not None:
        return of_blocks(q, k, v, where, dealt, pattern_of(layout), causal, scale, purpose)
    if method == "ring":
        return _ring(q, k, v, where, causal, q.shape[-1] ** -0.5 if scale is None else scale, purpose)
    there, back = SequencesOfHeads(where, dealt, purpose), HeadsOfChunks(where, dealt, purpose)
    heads = q.shape[-3]
    k, v = (_for_ranks(x, heads, where.size) for x in (k, v))
    q, k, v = (Linear.apply(there, x)[0] for x in (q, k, v))
    length = q.shape[-2]
    part = Part(Sizes(heads, length, length), where.rank * q.shape[-3], ((0, length),), ((0, length),))
    return Linear.apply(back, _whole(q, k, v, causal, scale, mask, layout, part))[0]


def _purpose(causal: bool, scale: float | None, mask: Tensor | None, layout: What | None, chunks: Chunks) -> str:
    """Return what must be the same on all ranks: each attends to the keys of all."""
    given: dict[str, object] = {"causal": causal} if mask is None else {"mask": True}
    given |= {"scale": scale, "layout": None if layout is None else described(layout)}
    if chunks != Chunks.early_and_late(chunks.size):
        given["chunks"] = str(chunks.of)
    return f"attention({', '.join(f'{name}={x}' for name, x in given.items() if x is not None)})"


def check_method(what: str, method: str) -> None:
    """Raise `ValueError` for an unknown method."""
    if method not in METHODS:
        raise ValueError(f"{what}: method={method!r} is not known; write {' or '.join(map(repr, METHODS))}.")


def _check(q: Tensor, k: Tensor, axis: Axis, method: str, chunks: Chunks) -> None:
    for name, x in (("q", q), ("k", k)):
        if x.dim() < 3:
            raise ValueError(f"attention: {name} must be [..., heads, tokens, width], got {list(x.shape)}.")
    heads, groups, size = q.shape[-3], k.shape[-3], q.shape[-2]
    check_method("attention", method)
    if heads % groups:
        raise ValueError(
            "attention: the number of query heads must be a multiple of the number of key heads; got "
            f"{heads} and {groups}."
        )
    if method == "ulysses" and heads % axis.size:
        raise ValueError(
            f"attention: {axis.size} ranks along {axis.name!r} cannot divide {heads} heads equally. Write "
            "method='ring', which works for any number of heads."
        )
    if axis.size > 1 and (size % chunks.each or k.shape[-2] != size):
        two = {1: "a chunk", 2: "two chunks of one size"}.get(chunks.each, f"{chunks.each} chunks of one size")
        raise ValueError(
            f"attention: expected queries and keys of {two}, got {size} and {k.shape[-2]} tokens. Split batches with "
            "zerofn.parallel.split_sequence."
        )


def _check_mask(mask: Tensor, length: int, method: str, axis: Axis) -> None:
    if method == "ring" and axis.size > 1:
        raise ValueError("attention: method='ring' does not support a mask. Write method='ulysses'.")
    if mask.dtype != torch.bool or mask.shape[-2:] != (length, length) or mask.shape[-3:-2] not in ((), (1,)):
        raise ValueError(
            f"attention: expected a mask of booleans [..., 1, {length}, {length}], which says to which tokens each "
            f"token of the whole sequence attends, got {mask.dtype} {list(mask.shape)}."
        )


def _check_layout(
    qkv: tuple[Tensor, Tensor, Tensor], layout: What, mask: Tensor | None, method: str, axis: Axis
) -> None:
    if mask is not None:
        raise ValueError(
            "attention: got a mask and a layout, and each says which tokens attend to which. Pass the layout only."
        )
    if axis.size == 1:
        return
    check_part(*qkv, layout, qkv[0].shape[-2] * axis.size)
    if isinstance(layout, Layout) and (method == "ring" or layout.sizes.heads > 1):
        raise ValueError(
            "attention: a sparse.Layout describes whole sequences and all heads, but a rank has only a part of them. "
            "Pass the pattern from which the layout was made."
        )
    if isinstance(layout, Blocks) and method == "ring":
        raise ValueError(
            "attention: with method='ring' ranks must know before a step which blocks of keys they send, so the step "
            "cannot choose the blocks. Write method='ulysses', and choose blocks of the whole sequence."
        )


def _for_ranks(x: Tensor, heads: int, num: int) -> Tensor:
    """Repeat key and value heads until ranks can share them, so that each rank has the heads that its queries
    need.

    The gradients of the copies are summed, as those of any value that is used several times.
    """
    groups = x.shape[-3]
    if groups % num == 0:
        return x
    wanted = num if num % groups == 0 else heads
    return x.repeat_interleave(wanted // groups, -3)


def _whole(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool,
    scale: float | None,
    mask: Tensor | None,
    layout: What | None,
    part: Part | None = None,
) -> Tensor:
    """Attention over whole sequences. `part`: which heads this rank has."""
    if layout is not None:
        return with_logsumexp(q, k, v, layout, is_causal=causal, scale=scale, part=part)[0]
    attend = torch.nn.functional.scaled_dot_product_attention
    grouped = q.shape[-3] != k.shape[-3]
    if mask is None:
        return attend(q, k, v, is_causal=causal, scale=scale, enable_gqa=grouped)
    if grouped:  # on devices, kernels of grouped heads know no mask
        k, v = (x.repeat_interleave(q.shape[-3] // x.shape[-3], -3) for x in (k, v))
    return attend(q, k, v, mask, scale=scale)


class _Part(NamedTuple):
    """The contribution of blocks of keys to rows of queries. `values`: the sum of exp(score - greatest) * value;
    `weights`: the sum of exp(score - greatest).
    """

    values: Tensor
    weights: Tensor
    greatest: Tensor

    def __add__(self, other: _Part) -> _Part:  # type: ignore[override]
        greatest = torch.maximum(self.greatest, other.greatest)
        mine, theirs = (self.greatest - greatest).exp(), (other.greatest - greatest).exp()
        return _Part(self.values * mine + other.values * theirs, self.weights * mine + other.weights * theirs, greatest)

    def halves(self) -> list[_Part]:
        """The first chunk's rows, and the second's."""
        return [_Part(*xs) for xs in zip(*(x.chunk(2, -2) for x in self), strict=True)]


@remat  # scores are never kept, only what they are computed from
def _attend(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool = False) -> _Part:
    """q [B, G, n, s, D], k [B, G, 1, t, D], v [B, G, 1, t, E]."""
    scores = (q @ k.transpose(-1, -2)) * scale
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    if causal:
        behind = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(behind, float("-inf"))
    # Any number would do, so its derivative is none: what it is subtracted from is divided by the same sum.
    greatest = scores.detach().amax(-1, keepdim=True)
    terms = (scores - greatest).exp()
    return _Part((terms.to(v.dtype) @ v).to(scores.dtype), terms.sum(-1, keepdim=True), greatest)


def _ring(q: Tensor, k: Tensor, v: Tensor, axis: Axis, causal: bool, scale: float, purpose: str) -> Tensor:
    half = q.shape[-2] // 2
    works_by_rank(axis)  # what is between its chunks, before or behind both
    q = q.unflatten(-3, (k.shape[-3], -1))
    on = Permute(axis, tuple((r - 1) % axis.size for r in range(axis.size)), purpose)
    parts: list[_Part] = []  # of the first chunk's rows, and of the second's
    block = k, v
    for turn in range(axis.size):
        here, source = block, (axis.rank - turn) % axis.size
        if turn < axis.size - 1:  # sent on before it is used: the next block comes meanwhile
            block = Linear.apply(on, here[0])[0], Linear.apply(on, here[1])[0]
        keys, values = (x.unsqueeze(-3) for x in here)
        if causal and source > axis.rank:  # both of its chunks are between this rank's
            parts[1] += _attend(q[..., half:, :], keys, values, scale)
            continue
        if causal and source < axis.rank:  # its second chunk is behind both of this rank's
            keys, values = keys[..., :half, :], values[..., :half, :]
        found = _attend(q, keys, values, scale, causal=causal and turn == 0).halves()
        parts = [a + b for a, b in zip(parts, found, strict=True)] if parts else found
    return torch.cat([x.values / x.weights for x in parts], -2).flatten(-4, -3).to(q.dtype)
