"""Chunks that give ranks along `context` equal work and few keys to send."""

from __future__ import annotations

from collections.abc import Iterator

from ..comm.mesh import Mesh
from ..sparse.attention import What, are_numbers, known_part, pattern_of
from ..sparse.patterns import Pattern, Sizes
from ..util.arguments import checked
from .chunks import Chunks
from .key_blocks import needs_of

# What a key and a value cost that travel, and whose gradients go back, in pairs of tokens. Of width D that is 16 D
# bytes in float32, and a pair is 14 D multiplications and additions, forward and backward. So this is a machine with
# 290 of these for a byte that it sends: a fast GPU on a fast link. The rank that has the most of both is waited for.
_PAIRS_OF_A_KEY = 256
_FINER = (2, 4, 8)  # chunks of a rank in deals that are tried


@checked("length", "mesh", "causal", "heads")
def balanced_chunks(layout: What, length: int, mesh: Mesh, *, causal: bool = True, heads: int = 1) -> Chunks:
    """Return which chunks of a row each rank along `context` should have, for attention in a ring by a layout.

    `layout`: a pattern or a function, see `zerofn.sparse.attention`. Documents that a batch brings or that differ
    between rows, and padding, are not counted. `length`: the tokens of a row. `causal`: whether a query attends only to
    earlier tokens and itself.
    `heads`: the number of query heads, if the layout differs between heads.

    We try these ways to distribute chunks: one chunk per rank, in order; an early and a late chunk per rank; and 2, 4
    or 8 chunks per rank, where the chunk with the most work goes to the rank with the least. We choose the way in which
    the busiest rank has the least to do. Its work is the pairs of tokens in computed tiles, plus 256 for each key that
    it sends or receives. Under a causal window, for example, one chunk per rank in order wins: ranks have equal work,
    and each sends one window. Pass the result to `split_sequence` and to `attention` or `context`. The same arguments
    give the same chunks on all ranks.

    Raises `ValueError` for a length that the ranks do not divide, and `TypeError` for a layout that is not a pattern.

    >>> from zerofn import sparse
    >>> balanced_chunks(sparse.sliding_window(64), 512, Mesh.make(data=-1))
    Chunks(of=((0,),))
    """
    size = mesh.tokens.size
    if length < 1 or length % size:
        raise ValueError(
            f"balanced_chunks: {size} ranks along {mesh.tokens.name!r} cannot divide {length} tokens equally. Pad rows "
            f"to {max(length, 1) + -max(length, 1) % size}."
        )
    pattern = known_part(pattern_of(layout), causal, are_numbers)[0]
    sizes = Sizes(heads, length, length)
    deals = list(_deals(pattern, sizes, size))
    costs = [_most_of_a_rank(pattern, sizes, chunks) for chunks in deals]
    return deals[costs.index(min(costs))]


def _deals(pattern: Pattern, sizes: Sizes, size: int) -> Iterator[Chunks]:
    """Yield the ways to deal chunks that are tried, the one that sends the least first."""
    yield Chunks.in_order(size)
    if size == 1:
        return
    if sizes.queries % (2 * size) == 0:
        yield Chunks.early_and_late(size)
    for each in _FINER:
        if sizes.queries % (each * size) == 0:
            yield _greedy(_work(pattern, sizes, each * size), size)


def _work(pattern: Pattern, sizes: Sizes, num: int) -> list[int]:
    """Return the work of each of `num` chunks."""
    alone = Chunks.in_order(num)
    return [int(n) for n in needs_of(pattern, sizes, alone).pairs]


def _greedy(work: list[int], size: int) -> Chunks:
    """Give the chunk with the most work to the rank with the least, until each rank has its number of chunks."""
    each, mine, total = len(work) // size, [list[int]() for _ in range(size)], [0] * size
    for chunk in sorted(range(len(work)), key=lambda k: (-work[k], k)):
        rank = min((r for r in range(size) if len(mine[r]) < each), key=lambda r: (total[r], r))
        mine[rank].append(chunk)
        total[rank] += work[chunk]
    return Chunks(tuple(tuple(sorted(x)) for x in mine))


def _most_of_a_rank(pattern: Pattern, sizes: Sizes, chunks: Chunks) -> int:
    """Return the work of the busiest rank, in pairs of tokens."""
    needs = needs_of(pattern, sizes, chunks)
    away = needs.counts.fill_diagonal_(0)
    moved = away.sum(0).maximum(away.sum(1)).tolist()
    pairs = [int(needs.pairs[list(mine)].sum()) for mine in chunks.of]
    return max(n + _PAIRS_OF_A_KEY * keys for n, keys in zip(pairs, moved, strict=True))
