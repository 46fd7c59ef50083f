"""Layouts: what a pattern allows of given sizes, as runs of keys for each block of queries."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from .._torch_compat import plain_dispatch
from ..util.arguments import checked
from ..util.html import preformatted
from .patterns import FULL, NONE, PARTIAL, Function, Pattern, Sizes, Tiles
from .picture import svg

WORD = 64  # queries of a word of bits
_PICTURES = 8  # heads of a layout that a notebook shows
_AT_ONCE = 1 << 16  # pairs of tokens that a pattern is asked about together: 1 MB of words


@dataclass(frozen=True, eq=False)
class Layout:
    """Which tiles are computed. `zerofn.sparse.layout` makes one.

    `sizes`: numbers of heads (1 if all heads are equal), queries and keys. `tile`: queries and keys of a tile. `status`
    int8 [heads, tiles of queries, tiles of keys]: 0 none, 1 some, 2 all pairs of a tile are attended. `starts`, `runs`,
    `bits`: see `zerofn.ops.attention_keys.Keys`. `computed`, `attended`: numbers of pairs of tokens over all heads, in
    computed tiles, and allowed by the pattern.

    >>> from zerofn import sparse
    >>> found = sparse.layout(sparse.causal, 256)
    >>> found.attended == 256 * 257 / 2
    True
    """

    sizes: Sizes
    tile: int
    status: Tensor
    starts: Tensor
    runs: Tensor
    bits: Tensor | None
    computed: int
    attended: int

    @property
    def share(self) -> float:
        """The part of all pairs of tokens that is computed."""
        return self.computed / max(1, self.sizes.heads * self.sizes.queries * self.sizes.keys)

    def __repr__(self) -> str:
        heads, queries, keys = self.sizes
        tiles, whose = int((self.status > NONE).sum()), "all heads" if heads == 1 else f"{heads} heads"
        return (
            f"Layout of {queries} queries and {keys} keys, {whose}: {tiles} of {self.status.numel()} tiles of "
            f"{self.tile}, {100 * self.share:.1f} % of the pairs"
        )

    def _repr_html_(self) -> str:
        heads = range(min(_PICTURES, len(self.status)))
        names = ["all heads"] if self.sizes.heads == 1 else [f"head {head}" for head in heads]
        return preformatted(repr(self)) + "".join(map(svg, self.status, names))


@checked()
def layout(
    pattern: Pattern | Callable[[Tensor, Tensor, Tensor], Tensor],
    queries: int,
    keys: int | None = None,
    *,
    heads: int = 1,
) -> Layout:
    """Evaluate a pattern by tiles, some tiles at a time, never for all pairs of tokens at once.

    `pattern`: or a function of (head, query, key), as for `sparse.attention`. `queries`, `keys`: numbers of tokens;
    `keys` is by default equal to `queries`. `heads`: number of query heads; a pattern that is the same for all heads
    makes a layout of one head.

    >>> from zerofn import sparse
    >>> sparse.layout(sparse.sliding_window(64) & sparse.causal, 256)
    Layout of 256 queries and 256 keys, all heads: 7 of 16 tiles of 64, 43.8 % of the pairs
    """
    sizes = Sizes(heads, queries, queries if keys is None else keys)
    if min(sizes) < 1:
        raise ValueError(
            f"sparse.layout: queries={queries}, keys={sizes.keys} and heads={heads} must all be 1 or more."
        )
    pattern = pattern if isinstance(pattern, Pattern) else Function(pattern)
    with plain_dispatch():  # a step may make a layout: it depends on numbers alone
        return _made(pattern, sizes)


def _made(pattern: Pattern, sizes: Sizes) -> Layout:
    tile = tile_of(pattern)
    tiles = _tiles(sizes, tile)
    status, bits, rows, in_part = _asked(pattern, sizes, tiles, tile)
    starts, runs = _runs(status, rows, keys=sizes.keys, tile=tile)
    computed, full = _pairs(starts, runs, (tiles.q1 - tiles.q0 + 1)[:, 0])
    return Layout(sizes._replace(heads=len(status)), tile, status, starts, runs, bits, computed, full + in_part)


def tile_of(pattern: Pattern) -> int:
    """Return the queries and keys of a tile of a pattern's layout."""
    return min(WORD, pattern.tile)


def statuses_of(pattern: Pattern, sizes: Sizes, tiles: Tiles) -> Tensor:
    """Return what a pattern allows of tiles that have at most `tile_of(pattern)` queries and keys, int8 [heads or 1,
    tiles of queries, tiles of keys].
    """
    return _asked(pattern, sizes, tiles, tile_of(pattern))[0]


def _tiles(sizes: Sizes, tile: int) -> Tiles:
    q0, k0 = torch.arange(0, sizes.queries, tile), torch.arange(0, sizes.keys, tile)
    q1, k1 = (q0 + tile - 1).clamp(max=sizes.queries - 1), (k0 + tile - 1).clamp(max=sizes.keys - 1)
    return Tiles(q0[:, None], q1[:, None], k0[None], k1[None])


def _pairs(starts: Tensor, runs: Tensor, queries: Tensor) -> tuple[int, int]:
    """Return how many pairs of tokens runs have, all of them and those of which all pairs are attended. `queries`: of
    each tile.
    """
    of_run = queries.repeat(len(starts)).repeat_interleave(starts.long().diff().flatten())
    pairs = of_run * runs[:, 1]
    return int(pairs.sum()), int(pairs[runs[:, 2] < 0].sum())


def _differs(pattern: Pattern, sizes: Sizes) -> bool:
    """Return whether a pattern looks at the number of a head, of several."""
    if sizes.heads == 1:
        return False
    place = torch.zeros(1, 1, 1, dtype=torch.int64)
    found = pattern.allowed(torch.arange(sizes.heads)[:, None, None], place, place, sizes)
    return found.dim() == 3 and len(found) == sizes.heads


def _asked(pattern: Pattern, sizes: Sizes, tiles: Tiles, tile: int) -> tuple[Tensor, Tensor | None, Tensor, int]:
    """Ask a pattern about tiles, and about all tokens of those of which nothing else is known. Return the status, with
    `PARTIAL` where a tile is so; bits; the row of each such tile there; and how many pairs these allow.
    """
    status = pattern.status(tiles, sizes)
    status = status.repeat(sizes.heads if len(status) == 1 and _differs(pattern, sizes) else 1, 1, 1)
    asked, in_tile = (status == PARTIAL).nonzero(), torch.arange(tile)
    rows, numbers = torch.empty(len(asked), dtype=torch.int64), dict[bytes, int]()
    num = seen = 0
    for part in asked.split(max(1, _AT_ONCE // tile**2)):
        of_query, of_key = part[:, 1], part[:, 2]
        query, key = tiles.q0[of_query] + in_tile, tiles.k0[0, of_key][:, None] + in_tile
        last_query, last_key = tiles.q1[of_query], tiles.k1[0, of_key][:, None]
        real = (query <= last_query)[:, :, None] & (key <= last_key)[:, None]
        query, key = query.minimum(last_query)[:, :, None], key.minimum(last_key)[:, None]
        allowed = pattern.allowed(part[:, 0, None, None], query, key, sizes).expand(real.shape) & real
        none, full = ~allowed.flatten(1).any(1), (allowed | ~real).flatten(1).all(1)
        status[tuple(part[none].T)], status[tuple(part[full].T)] = NONE, FULL
        allowed = allowed[~(none | full)]
        num += int(allowed.sum())
        words = (allowed.long() << in_tile[:, None]).sum(1)  # of each key a word: the last bit is a sign
        # Nothing but new words stays: small tensors between the large ones of each part would keep their memory apart.
        mine = [numbers.setdefault(x.tobytes(), len(numbers)) for x in words.numpy()]
        rows[seen : seen + len(mine)] = torch.tensor(mine, dtype=torch.int64)
        seen += len(mine)
    if not numbers:
        return status, None, rows[:0], num
    bits = torch.frombuffer(bytearray().join(numbers), dtype=torch.int64).view(-1, tile)
    return status, torch.nn.functional.pad(bits, (0, WORD - tile)), rows[:seen], num


def _runs(status: Tensor, rows: Tensor, keys: int, tile: int) -> tuple[Tensor, Tensor]:
    """Return (starts, runs): neighbouring tiles of which all is attended are one run; others have a row of bits."""
    heads, num, _ = status.shape
    at = (status > NONE).nonzero()
    of_block, column = at[:, 0] * num + at[:, 1], at[:, 2]
    partial = status[tuple(at.T)] == PARTIAL
    begins = torch.ones(len(at), dtype=torch.bool)
    begins[1:] = (of_block.diff() != 0) | (column.diff() != 1) | partial[1:] | partial[:-1]
    first = begins.nonzero()[:, 0]
    last = torch.cat([first[1:], torch.tensor([len(at)])])[: len(first)] - 1
    row = torch.full((len(at),), -1)
    row[partial] = rows
    start = column[first] * tile
    runs = torch.stack([start, ((column[last] + 1) * tile).clamp(max=keys) - start, row[first]], 1)
    counted = torch.bincount(of_block[first], minlength=heads * num).cumsum(0)
    ends = torch.cat([torch.zeros(1, dtype=torch.int64), counted])
    starts = torch.stack([ends[h * num : (h + 1) * num + 1] for h in range(heads)])
    return starts.to(torch.int32), runs.to(torch.int32).contiguous()
