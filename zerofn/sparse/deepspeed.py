"""The six patterns of DeepSpeed's sparse attention, by blocks of tokens, as versions up to 0.19.6 make them.

Parameters have DeepSpeed's names and defaults; the number of heads is that of the queries. With "unidirectional"
queries attend to all tokens of their own block and, in `variable` and in `fixed` with several global blocks, to some
blocks after it, as in DeepSpeed: for a decoder write `attention(..., is_causal=True)`, or `& sparse.causal`. The last
block of a row may have fewer tokens. *Global* blocks are blocks of keys to which all queries attend (with
"unidirectional", all later ones).
"""

from __future__ import annotations

import functools
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from ..util.arguments import checked
from .patterns import FULL, PARTIAL, Pattern, Sizes, Tiles

__all__ = ["bigbird", "bslongformer", "dense", "fixed", "local_sliding_window", "variable"]
Attention = Literal["bidirectional", "unidirectional"]
_DIRECTIONS = get_args(Attention)
_MAY_BE_ZERO = {"num_random_blocks", "num_sliding_window_blocks", "num_global_blocks"}


@dataclass(frozen=True)
class BlockPattern(Pattern):
    """A pattern of whole blocks. `per_head`: whether heads differ."""

    block: int
    per_head: bool

    @property
    def tile(self) -> int:  # type: ignore[override]
        """A block, or a part of one."""
        return min(self.block, 64)

    def head(self, number: int, draws: random.Random, blocks: Tensor) -> None:
        """Set the blocks [blocks of queries, of keys] of a head to True."""
        raise NotImplementedError

    def allowed(self, head: Tensor, query: Tensor, key: Tensor, sizes: Sizes) -> Tensor:
        """By the tokens' blocks."""
        blocks, query, key = _blocks(self, sizes), query // self.block, key // self.block
        return blocks[0][query, key] if len(blocks) == 1 else blocks[head, query, key]

    def status(self, tiles: Tiles, sizes: Sizes) -> Tensor:
        """By the blocks, of tiles that are in one."""
        q0, q1, k0, k1 = (x // self.block for x in tiles)
        named = _blocks(self, sizes)[:, q0, k0].to(torch.int8) * FULL
        return torch.where((q0 == q1) & (k0 == k1), named, PARTIAL)


@functools.lru_cache(maxsize=16)
def _blocks(pattern: BlockPattern, sizes: Sizes) -> Tensor:
    """Return which blocks are attended, booleans [heads or 1, blocks, blocks]."""
    if sizes.queries != sizes.keys:
        raise ValueError(
            f"sparse.deepspeed: these patterns need as many queries as keys, got {sizes.queries} and {sizes.keys}."
        )
    num, draws = -(-sizes.queries // pattern.block), random.Random(getattr(pattern, "seed", 0))
    blocks = torch.zeros(sizes.heads if pattern.per_head else 1, num, num, dtype=torch.bool)
    for head, mine in enumerate(blocks):
        pattern.head(head, draws, mine)
    return blocks


@dataclass(frozen=True)
class _Dense(BlockPattern):
    def head(self, number: int, draws: random.Random, blocks: Tensor) -> None:
        blocks.fill_(True)


@dataclass(frozen=True)
class _Fixed(BlockPattern):
    local: int
    shared: int
    causal: bool
    rows: bool
    patterns: int

    def head(self, number: int, draws: random.Random, blocks: Tensor) -> None:
        num = len(blocks)
        _local(blocks, [self.local], self.causal)
        first = self.local - (1 + number % self.patterns) * self.shared
        end = num - num % self.local
        starts = list(range(first, end, self.local))
        if end < num:
            starts.append(min(end + first, num - self.shared))
        for start in starts:
            _shared(blocks, start, start + self.shared, self.causal, self.rows)


@dataclass(frozen=True)
class _Variable(BlockPattern):
    drawn: int
    local: tuple[int, ...]
    shared: tuple[tuple[int, int], ...]
    causal: bool
    rows: bool
    seed: int

    def head(self, number: int, draws: random.Random, blocks: Tensor) -> None:
        _drawn(blocks, self.drawn, draws, causal=False)
        _local(blocks, self.local, self.causal)
        for start, end in self.shared:
            _shared(blocks, start, end, self.causal, self.rows)


@dataclass(frozen=True)
class _BigBird(BlockPattern):
    drawn: int
    window: int
    shared: int
    causal: bool
    seed: int

    def head(self, number: int, draws: random.Random, blocks: Tensor) -> None:
        _enough(blocks, "num_global_blocks", self.shared)
        _drawn(blocks, self.drawn, draws, self.causal)
        _window(blocks, self.window)
        _shared(blocks, 0, self.shared, causal=False, rows=True)
        if self.causal:
            blocks.tril_()


@dataclass(frozen=True)
class _Longformer(BlockPattern):
    window: int
    shared: tuple[tuple[int, int], ...]
    causal: bool

    def head(self, number: int, draws: random.Random, blocks: Tensor) -> None:
        _window(blocks, self.window)
        for start, end in self.shared:
            _shared(blocks, start, end, causal=False, rows=True)
        if self.causal:
            blocks.tril_()


# --- parts of patterns ---------------------------------------------------------------------------


def _enough(blocks: Tensor, name: str, num: int) -> None:
    if len(blocks) < num:
        raise ValueError(f"sparse.deepspeed: {name}={num}, but the row has only {len(blocks)} blocks.")


def _local(blocks: Tensor, sizes: Sequence[int], causal: bool) -> None:
    """Adjacent windows of these sizes, the last size repeated."""
    start, k = 0, 0
    while start < len(blocks):
        size = sizes[min(k, len(sizes) - 1)]
        here = blocks[start : start + size, start : start + size]
        here |= torch.ones_like(here).tril() if causal else True
        start, k = start + size, k + 1


def _shared(blocks: Tensor, start: int, end: int, causal: bool, rows: bool) -> None:
    """Blocks of keys to which all queries attend, or all later ones; with `rows`, their queries attend to all keys."""
    if start >= len(blocks):
        return
    blocks[start if causal else 0 :, start:end] = True
    if rows:
        blocks[start:end] = True


def _drawn(blocks: Tensor, num: int, draws: random.Random, causal: bool) -> None:
    """Blocks drawn for each row; of a first row that has fewer, all of them."""
    _enough(blocks, "num_random_blocks", num)
    for row in range(len(blocks)):
        among = row + 1 if causal else len(blocks)
        blocks[row, draws.sample(range(among), min(num, among))] = True


def _window(blocks: Tensor, num: int) -> None:
    """Blocks within half of `num` of a query's own."""
    _enough(blocks, "num_sliding_window_blocks", num)
    at = torch.arange(len(blocks))
    blocks |= (at[:, None] - at).abs() <= num // 2


# --- the six -------------------------------------------------------------------------------------


def _check(where: str, attention: str, rows: bool = False, **numbers: int) -> bool:
    """Raise `ValueError` for what no pattern has. Return whether it is unidirectional."""
    if attention not in _DIRECTIONS:
        raise ValueError(f"sparse.deepspeed.{where}: attention must be {' or '.join(_DIRECTIONS)}, got {attention!r}.")
    for name, value in numbers.items():
        least = 0 if name in _MAY_BE_ZERO else 1
        if value < least:
            raise ValueError(f"sparse.deepspeed.{where}: {name}={value} must be {least} or more.")
    if rows and attention == "unidirectional":
        raise ValueError(
            f"sparse.deepspeed.{where}: horizontal_global_attention attends to later tokens, so attention must be "
            "'bidirectional'."
        )
    return attention == "unidirectional"


def _spans(where: str, starts: Sequence[int], ends: Sequence[int] | None) -> tuple[tuple[int, int], ...]:
    if any(a < 0 for a in starts):
        raise ValueError(
            f"sparse.deepspeed.{where}: global_block_indices count blocks from 0, the first block of a row; got "
            f"{list(starts)}."
        )
    ends = [x + 1 for x in starts] if ends is None else ends
    if len(starts) != len(ends) or any(a >= b for a, b in zip(starts, ends, strict=False)):
        raise ValueError(
            f"sparse.deepspeed.{where}: global_block_end_indices must have one number for each of "
            f"global_block_indices, and be larger than it; got {list(starts)} and {list(ends)}."
        )
    return tuple(zip(starts, ends, strict=True))


@checked()
def dense(block: int = 16, different_layout_per_head: bool = False) -> Pattern:
    """All blocks."""
    _check("dense", "bidirectional", block=block)
    return _Dense(block, False)


@checked()
def fixed(
    block: int = 16,
    different_layout_per_head: bool = False,
    num_local_blocks: int = 4,
    num_global_blocks: int = 1,
    attention: Attention = "bidirectional",
    horizontal_global_attention: bool = False,
    num_different_global_patterns: int = 1,
) -> Pattern:
    """Adjacent windows, whose last blocks are global blocks (Child et al., arXiv:1904.10509, customized).

    Raises `ValueError` for numbers that DeepSpeed refuses.

    >>> from zerofn import sparse
    >>> sparse.layout(sparse.deepspeed.fixed(), 256)
    Layout of 256 queries and 256 keys, all heads: 112 of 256 tiles of 16, 43.8 % of the pairs
    """
    numbers = {"num_local_blocks": num_local_blocks, "num_global_blocks": num_global_blocks, "block": block}
    causal = _check("fixed", attention, horizontal_global_attention, **numbers)
    if not num_global_blocks or num_local_blocks % num_global_blocks:
        raise ValueError(
            f"sparse.deepspeed.fixed: num_global_blocks={num_global_blocks} does not divide "
            f"num_local_blocks={num_local_blocks}."
        )
    most = num_local_blocks // num_global_blocks if different_layout_per_head else 1
    if not 1 <= num_different_global_patterns <= most:
        raise ValueError(
            f"sparse.deepspeed.fixed: num_different_global_patterns={num_different_global_patterns} must be from 1 to "
            f"{most}. The largest is num_local_blocks / num_global_blocks with different_layout_per_head, and 1 "
            "without."
        )
    rows, patterns = horizontal_global_attention, num_different_global_patterns
    return _Fixed(block, different_layout_per_head, num_local_blocks, num_global_blocks, causal, rows, patterns)


@checked()
def variable(
    block: int = 16,
    different_layout_per_head: bool = False,
    num_random_blocks: int = 0,
    local_window_blocks: Sequence[int] = (4,),
    global_block_indices: Sequence[int] = (0,),
    global_block_end_indices: Sequence[int] | None = None,
    attention: Attention = "bidirectional",
    horizontal_global_attention: bool = False,
    *,
    seed: int = 0,
) -> Pattern:
    """Adjacent windows of `local_window_blocks`, the last size repeated; global blocks; and random blocks, as DeepSpeed
    draws them after `random.seed(seed)`. Raises `ValueError` for numbers that DeepSpeed refuses.
    """
    causal = _check(
        "variable", attention, horizontal_global_attention, block=block, num_random_blocks=num_random_blocks
    )
    if not local_window_blocks or min(local_window_blocks) < 1:
        raise ValueError(
            "sparse.deepspeed.variable: local_window_blocks must be a list of one or more numbers, each 1 or more; got "
            f"{list(local_window_blocks)}."
        )
    shared = _spans("variable", global_block_indices, global_block_end_indices)
    rows, local = horizontal_global_attention, tuple(local_window_blocks)
    return _Variable(block, different_layout_per_head, num_random_blocks, local, shared, causal, rows, seed)


@checked()
def bigbird(
    block: int = 16,
    different_layout_per_head: bool = False,
    num_random_blocks: int = 1,
    num_sliding_window_blocks: int = 3,
    num_global_blocks: int = 1,
    attention: Attention = "bidirectional",
    *,
    seed: int = 0,
) -> Pattern:
    """A sliding window; the first blocks as global blocks, whose queries also attend to all keys; and random blocks, as
    DeepSpeed draws them after `random.seed(seed)` (Zaheer et al., arXiv:2007.14062). Raises `ValueError` for numbers
    that DeepSpeed refuses, except that with "unidirectional" the first queries may have fewer blocks than
    `num_random_blocks`, and attend to all of them.
    """
    numbers = {"num_sliding_window_blocks": num_sliding_window_blocks, "num_global_blocks": num_global_blocks}
    causal = _check("bigbird", attention, False, block=block, num_random_blocks=num_random_blocks, **numbers)
    window, shared = num_sliding_window_blocks, num_global_blocks
    return _BigBird(block, different_layout_per_head, num_random_blocks, window, shared, causal, seed)


@checked()
def bslongformer(
    block: int = 16,
    different_layout_per_head: bool = False,
    num_sliding_window_blocks: int = 3,
    global_block_indices: Sequence[int] = (0,),
    global_block_end_indices: Sequence[int] | None = None,
    attention: Attention = "bidirectional",
) -> Pattern:
    """A sliding window, and global blocks, whose queries also attend to all keys (Beltagy et al., arXiv:2004.05150, by
    blocks). Raises `ValueError` for numbers that DeepSpeed refuses.
    """
    causal = _check("bslongformer", attention, block=block, num_sliding_window_blocks=num_sliding_window_blocks)
    shared = _spans("bslongformer", global_block_indices, global_block_end_indices)
    return _Longformer(block, False, num_sliding_window_blocks, shared, causal)


@checked()
def local_sliding_window(
    block: int = 16, num_sliding_window_blocks: int = 3, attention: Attention = "unidirectional"
) -> Pattern:
    """A sliding window. Raises `ValueError` for numbers that DeepSpeed refuses."""
    causal = _check("local_sliding_window", attention, block=block, num_sliding_window_blocks=num_sliding_window_blocks)
    return _Longformer(block, False, num_sliding_window_blocks, (), causal)
