"""Attention by layouts over split sequences: each rank gets the blocks of keys and values that its queries attend to.

The pattern says which blocks these are. So every rank knows what all others need. One exchange of parts of unequal
sizes brings a rank its keys, and one call of attention uses them. Gradients return in the same way, and a rank adds up
those of its own keys in rank order. A rank needs memory only for these keys, not for all keys of a row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from .._torch_compat import plain_dispatch
from ..collectives.maps import Linear
from ..comm import exchange_parts  # noqa: F401  (defines the operation)
from ..comm.current_mesh import works_by_rank
from ..comm.mesh import Axis
from ..sparse.attention import are_numbers, known_part, with_logsumexp
from ..sparse.layout import statuses_of, tile_of
from ..sparse.part import Part, Runs, runs_of
from ..sparse.patterns import NONE, Pattern, Sizes, Tiles, cached_by_reads
from .chunks import Chunks

ops = torch.ops.zerofn


@dataclass(frozen=True, eq=False)
class Needs:
    """Which of a row's keys each rank needs for its queries.

    `keys` bool [ranks, positions]: whether a rank needs a key. `pairs` int64 [chunks]: the pairs of tokens in the tiles
    to which a chunk's queries attend, for one head.
    """

    chunks: Chunks
    keys: Tensor
    pairs: Tensor

    @property
    def counts(self) -> Tensor:
        """The number of keys that rank s has and rank r needs, int64 [s, r]."""
        by_chunk = self.keys.unflatten(1, (self.chunks.num, -1)).sum(2)
        owners = torch.nn.functional.one_hot(self.chunks.ranks, self.chunks.size)
        return (by_chunk @ owners).T.contiguous()


class _Blocks(NamedTuple):
    """A pattern, evaluated on the blocks of a row.

    `sizes`: the tokens of each block, int64 [blocks]. `pairs`: in the tiles to which a block's queries attend, for one
    head, int64 [blocks]. `looked_at`: whether some head attends, bool [blocks of queries, blocks of keys].
    """

    sizes: Tensor
    pairs: Tensor
    looked_at: Tensor


@cached_by_reads(16)
def _blocks(pattern: Pattern, sizes: Sizes, cut: int) -> _Blocks:
    """Return a pattern, evaluated on blocks of its tiles, which are also split after every `cut` tokens."""
    first = torch.arange(0, sizes.queries, cut)[:, None]
    start = first + torch.arange(0, cut, tile_of(pattern))
    last = torch.minimum(start + tile_of(pattern), (first + cut).clamp(max=sizes.queries)).flatten() - 1
    start = start.flatten()
    start, last = start[start <= last], last[start <= last]
    tiles = Tiles(start[:, None], last[:, None], start[None], last[None])
    computed = statuses_of(pattern, sizes, tiles) > NONE
    num = last - start + 1
    pairs = num * sum((num * head).sum(1) for head in computed) // len(computed)
    return _Blocks(num, torch.as_tensor(pairs), computed.any(0))


@cached_by_reads(64)
def needs_of(pattern: Pattern, sizes: Sizes, chunks: Chunks) -> Needs:
    """Return the keys that ranks need, by blocks of the pattern's tiles, which are split where chunks are."""
    with plain_dispatch():
        tokens, tile = sizes.queries // chunks.num, tile_of(pattern)
        # Where tiles end with chunks anyway, deals share what was asked.
        blocks = _blocks(pattern, sizes, tokens if tokens % tile else sizes.queries)
        by_chunk = blocks.looked_at.unflatten(0, (chunks.num, -1)).any(1)  # [chunks, blocks of keys]
        needed = torch.stack([by_chunk[list(mine)].any(0) for mine in chunks.of])
        for rank, mine in enumerate(chunks.of):  # something: an empty transfer is none
            needed[rank, mine[0] * (len(blocks.sizes) // chunks.num)] = True
        pairs = blocks.pairs.view(chunks.num, -1).sum(1)
        return Needs(chunks, needed.repeat_interleave(blocks.sizes, 1), pairs)


@dataclass(frozen=True, eq=False)
class Route:
    """How keys travel to this rank, and from it to others.

    `taken`: for each rank, the rows of this rank that it needs. `order`, `back`: the permutations from rank order to
    the order of positions, and back; None if both orders are equal. `counts`: the number of rows, at s * size + r those
    from rank s to rank r. `keys`: the positions of the keys that this rank gets. `tokens`: the number that it has.
    """

    taken: tuple[Tensor, ...]
    order: Tensor | None
    back: Tensor | None
    counts: tuple[int, ...]
    keys: Runs
    tokens: int


@cached_by_reads(64)
def route_of(pattern: Pattern, sizes: Sizes, chunks: Chunks, rank: int) -> Route:
    """Return how a rank's keys travel to it."""
    needs = needs_of(pattern, sizes, chunks)
    with plain_dispatch():
        place, owner = torch.arange(sizes.keys), chunks.ranks.repeat_interleave(sizes.keys // chunks.num)
        mine = [place[needs.keys[rank] & (owner == source)] for source in range(chunks.size)]
        arrived = torch.cat(mine)
        order = arrived.argsort()
        sorted_already = bool((order.diff() > 0).all())
        own = chunks.part(place, rank)
        return Route(
            tuple(needs.keys[r, own].nonzero()[:, 0] for r in range(chunks.size)),
            None if sorted_already else order,
            None if sorted_already else order.argsort(),
            tuple(needs.counts.flatten().tolist()),
            runs_of(arrived[order].tolist()),
            len(own),
        )


@dataclass(frozen=True)
class KeysNeeded:
    """[..., s, D], the keys of a rank's own tokens -> [..., n, D], the keys that it needs, in the order of their
    positions. `purpose`: as for `zerofn.collectives.maps.Exchange`.
    """

    axis: Axis
    route: Route
    purpose: str

    @property
    def transpose(self) -> SumsOfKeys:
        """Back to the ranks that have the keys."""
        return SumsOfKeys(self.axis, self.route, self.purpose)

    def __call__(self, x: Tensor) -> tuple[Tensor]:
        """One exchange."""
        rows = x.movedim(-2, 0)
        sent = torch.cat([rows.index_select(0, taken.to(x.device)) for taken in self.route.taken])
        found = _exchanged(sent, self.axis, self.route.counts, self.purpose)
        order = self.route.order
        return ((found if order is None else found.index_select(0, order.to(x.device))).movedim(0, -2),)


@dataclass(frozen=True)
class SumsOfKeys:
    """[..., n, D], of keys that a rank has received -> [..., s, D], of its own tokens: the sums over ranks in rank
    order.
    """

    axis: Axis
    route: Route
    purpose: str

    @property
    def transpose(self) -> KeysNeeded:
        """To the ranks that need the keys."""
        return KeysNeeded(self.axis, self.route, self.purpose)

    def __call__(self, x: Tensor) -> tuple[Tensor]:
        """One exchange, and the sums."""
        rows, back, size = x.movedim(-2, 0), self.route.back, self.axis.size
        rows = rows if back is None else rows.index_select(0, back.to(x.device))
        counts = self.route.counts
        turned = tuple(counts[r * size + s] for s in range(size) for r in range(size))
        found = _exchanged(rows, self.axis, turned, self.purpose)
        total = found.new_zeros(self.route.tokens, *found.shape[1:])
        parts = found.split([len(taken) for taken in self.route.taken])
        for taken, part in zip(self.route.taken, parts, strict=True):
            total = total.index_add(0, taken.to(x.device), part) if len(taken) else total
        return (total.movedim(0, -2),)


def _exchanged(rows: Tensor, axis: Axis, counts: tuple[int, ...], purpose: str) -> Tensor:
    """rows [what this rank sends, ...] -> [what it gets, ...], both in rank order."""
    width = rows.shape[1:].numel()
    sizes = [width * n for n in counts]
    flat = ops.wait(ops.exchange_parts(rows.reshape(-1), sizes, axis.size, axis.rank, axis.group, purpose))
    return flat.view(-1, *rows.shape[1:])


def of_blocks(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    axis: Axis,
    chunks: Chunks,
    pattern: Pattern,
    causal: bool,
    scale: float | None,
    purpose: str,
) -> Tensor:
    """Attention of a rank's queries, by a pattern of the whole sequence. See `attention`. `purpose`: what must be equal
    on all ranks.
    """
    length = q.shape[-2] * axis.size
    whole = Sizes(q.shape[-3], length, length)
    route = route_of(known_part(pattern, causal, are_numbers)[0], whole, chunks, axis.rank)
    works_by_rank(axis)  # what travels
    (both,) = Linear.apply(KeysNeeded(axis, route, purpose), torch.cat([k, v], -1))
    k, v = both.split([k.shape[-1], v.shape[-1]], -1)
    part = Part(whole, 0, chunks.runs(axis.rank, length), route.keys)
    return with_logsumexp(q, k, v, pattern, is_causal=causal, scale=scale, part=part)[0]
