"""Patterns: which keys a query looks at, as a function of their places, and what is known of whole tiles without it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Concatenate, NamedTuple, ParamSpec, TypeVar

import torch
from torch import Tensor

from ..util.arguments import checked
from .outside import OF_STEP, Reads, read_outside

P = ParamSpec("P")
T = TypeVar("T")
NONE, PARTIAL, FULL = 0, 1, 2  # of a tile's pairs are allowed; & is the least of two, and | the greatest


class Sizes(NamedTuple):
    """The heads, queries and keys of a call of attention."""

    heads: int
    queries: int
    keys: int


class Tiles(NamedTuple):
    """The first and last places of tiles: `q0`, `q1` int64 [tiles of queries, 1], `k0`, `k1` [1, tiles of keys]."""

    q0: Tensor
    q1: Tensor
    k0: Tensor
    k1: Tensor


class Pattern:
    """Which keys each query attends to. `a & b` allows pairs that both allow, `a | b` pairs that at least one allows.

    `tile`: the size of a tile, in queries and keys. It is 64; in a pattern of smaller blocks it is that of a block, so
    that no tile is attended in part.

    >>> from zerofn import sparse
    >>> window = sparse.sliding_window(64) & sparse.causal
    >>> isinstance(window, Pattern), isinstance(sparse.everything, Pattern)
    (True, True)
    """

    tile = 64

    def allowed(self, head: Tensor, query: Tensor, key: Tensor, sizes: Sizes) -> Tensor:
        """Return booleans for int64 tensors of places that broadcast to [heads, queries, keys]."""
        raise NotImplementedError

    def status(self, tiles: Tiles, sizes: Sizes) -> Tensor:
        """Return `NONE`, `PARTIAL` or `FULL` for each tile, int8 [heads or 1, tiles of queries, tiles of keys];
        `PARTIAL` where it is not known.
        """
        return torch.full((1, len(tiles.q0), tiles.k0.shape[1]), PARTIAL, dtype=torch.int8)

    def facts(self) -> Reads:
        """Return what the pattern depends on besides itself: what functions read outside."""
        return Reads((), True)

    def __and__(self, other: Pattern) -> Pattern:
        """What both allow."""
        return Both(self, _pattern(other))

    def __or__(self, other: Pattern) -> Pattern:
        """What either allows."""
        return Either(self, _pattern(other))

    def __rand__(self, other: object) -> Pattern:
        """Raise `TypeError`: `other` is no pattern."""
        return _pattern(other)

    __ror__ = __rand__


def cached_by_reads(
    most: int,
) -> Callable[[Callable[Concatenate[Pattern, P], T]], Callable[Concatenate[Pattern, P], T]]:
    """Return a decorator that caches `most` results of a function of a pattern and other hashable arguments. A result
    is found again only if the pattern's functions read the same values; if these cannot be compared, nothing is cached.
    """

    def decorate(make: Callable[Concatenate[Pattern, P], T]) -> Callable[Concatenate[Pattern, P], T]:
        @functools.lru_cache(most)
        def kept(facts: tuple[object, ...], pattern: Pattern, *args: P.args, **kwargs: P.kwargs) -> T:
            return make(pattern, *args, **kwargs)

        @functools.wraps(make)
        def found(pattern: Pattern, *args: P.args, **kwargs: P.kwargs) -> T:
            facts, complete = pattern.facts()
            if not complete:
                return make(pattern, *args, **kwargs)
            return kept(facts, pattern, *args, **kwargs)  # type: ignore[arg-type]  # all are hashable

        return found

    return decorate


def _pattern(x: object) -> Pattern:
    if not isinstance(x, Pattern):
        raise TypeError(
            f"sparse: & and | combine patterns, got {type(x).__name__}. For a function, write sparse.pattern(f); with "
            "sparse.chosen(index, block), write is_causal=True."
        )
    return x


def statuses(full: Tensor, none: Tensor) -> Tensor:
    """Return what is known of tiles, int8 [1, ...], from booleans."""
    found = torch.full(torch.broadcast_shapes(full.shape, none.shape), PARTIAL, dtype=torch.int8)
    return found.masked_fill_(none, NONE).masked_fill_(full, FULL)[None]


@dataclass(frozen=True)
class _OfTwo(Pattern):
    a: Pattern
    b: Pattern

    def facts(self) -> Reads:
        """Those of both."""
        a, b = self.a.facts(), self.b.facts()
        return Reads((a.facts, b.facts), a.complete and b.complete)

    @property
    def tile(self) -> int:  # type: ignore[override]
        """The smaller one."""
        return min(self.a.tile, self.b.tile)


@dataclass(frozen=True)
class Both(_OfTwo):
    """What two patterns allow."""

    def allowed(self, head: Tensor, query: Tensor, key: Tensor, sizes: Sizes) -> Tensor:
        """Both."""
        return self.a.allowed(head, query, key, sizes) & self.b.allowed(head, query, key, sizes)

    def status(self, tiles: Tiles, sizes: Sizes) -> Tensor:
        """The least."""
        return torch.minimum(self.a.status(tiles, sizes), self.b.status(tiles, sizes))


@dataclass(frozen=True)
class Either(_OfTwo):
    """What one of two patterns allows."""

    def allowed(self, head: Tensor, query: Tensor, key: Tensor, sizes: Sizes) -> Tensor:
        """Either."""
        return self.a.allowed(head, query, key, sizes) | self.b.allowed(head, query, key, sizes)

    def status(self, tiles: Tiles, sizes: Sizes) -> Tensor:
        """The greatest."""
        return torch.maximum(self.a.status(tiles, sizes), self.b.status(tiles, sizes))


@dataclass(frozen=True)
class Everything(Pattern):
    """All keys.

    >>> from zerofn import sparse
    >>> sparse.layout(sparse.everything, 256).attended  # 256 * 256
    65536
    """

    def allowed(self, head: Tensor, query: Tensor, key: Tensor, sizes: Sizes) -> Tensor:
        """True."""
        return torch.ones_like(query - key, dtype=torch.bool)

    def status(self, tiles: Tiles, sizes: Sizes) -> Tensor:
        """Full."""
        return torch.full((1, len(tiles.q0), tiles.k0.shape[1]), FULL, dtype=torch.int8)


@dataclass(frozen=True)
class Causal(Pattern):
    """The keys up to a query's own place.

    >>> from zerofn import sparse
    >>> sparse.layout(sparse.causal, 256).attended  # 1 + 2 + ... + 256
    32896
    """

    def allowed(self, head: Tensor, query: Tensor, key: Tensor, sizes: Sizes) -> Tensor:
        """None behind the query."""
        return key <= query

    def status(self, tiles: Tiles, sizes: Sizes) -> Tensor:
        """By the tile's corners."""
        return statuses(tiles.k1 <= tiles.q0, tiles.k0 > tiles.q1)


@dataclass(frozen=True)
class Window(Pattern):
    """The keys nearer than `window`."""

    window: int

    def allowed(self, head: Tensor, query: Tensor, key: Tensor, sizes: Sizes) -> Tensor:
        """Less than `window` apart."""
        return (query - key).abs() < self.window

    def status(self, tiles: Tiles, sizes: Sizes) -> Tensor:
        """By the tile's corners."""
        far = torch.maximum(tiles.q1 - tiles.k0, tiles.k1 - tiles.q0)
        near = torch.maximum(tiles.q0 - tiles.k1, tiles.k0 - tiles.q1)
        return statuses(far < self.window, near >= self.window)


@dataclass(frozen=True)
class Band(Pattern):
    """The keys whose place is that of the query, and `low` to `high` more."""

    low: int
    high: int

    def allowed(self, head: Tensor, query: Tensor, key: Tensor, sizes: Sizes) -> Tensor:
        """From `low` to `high` behind it."""
        return (key - query >= self.low) & (key - query <= self.high)

    def status(self, tiles: Tiles, sizes: Sizes) -> Tensor:
        """By the tile's corners."""
        least, most = tiles.k0 - tiles.q1, tiles.k1 - tiles.q0
        return statuses((least >= self.low) & (most <= self.high), (most < self.low) | (least > self.high))


def booleans_of(mask: Tensor) -> Tensor | None:
    """Return a mask as booleans: itself, or of numbers to add where they are 0, and not the least one or -inf; None if
    others are added.
    """
    if mask.dtype == torch.bool:
        return mask
    if not mask.is_floating_point():
        return None
    hidden = mask <= torch.finfo(mask.dtype).min
    return ~hidden if bool((hidden | (mask == 0)).all()) else None


@dataclass(frozen=True, eq=False)
class Given(Pattern):
    """What a mask says, booleans [heads or 1, queries, keys]."""

    mask: Tensor

    def allowed(self, head: Tensor, query: Tensor, key: Tensor, sizes: Sizes) -> Tensor:
        """By place."""
        return self.mask[0][query, key] if len(self.mask) == 1 else self.mask[head, query, key]

    def status(self, tiles: Tiles, sizes: Sizes) -> Tensor:
        """By the number of pairs of a tile, row of tiles by row of tiles."""
        found = []
        for first, last in zip(tiles.q0[:, 0].tolist(), tiles.q1[:, 0].tolist(), strict=True):
            sums = torch.nn.functional.pad(self.mask[:, first : last + 1].sum(1).cumsum(1), (1, 0))
            num = sums[:, tiles.k1[0] + 1] - sums[:, tiles.k0[0]]
            found.append(statuses(num == (tiles.k1 - tiles.k0 + 1) * (last - first + 1), num == 0)[0])
        return torch.stack(found, 1)


@dataclass(frozen=True)
class First(Pattern):
    """The first `num` keys; for `of_queries`, those between the first `num` tokens alone."""

    num: int
    of_queries: bool

    def allowed(self, head: Tensor, query: Tensor, key: Tensor, sizes: Sizes) -> Tensor:
        """Before `num`."""
        return (key < self.num) & ((query < self.num) if self.of_queries else torch.ones_like(query, dtype=torch.bool))

    def status(self, tiles: Tiles, sizes: Sizes) -> Tensor:
        """By the tile's corners."""
        queries = tiles.q1 if self.of_queries else torch.full_like(tiles.q1, -1)
        starts = tiles.q0 if self.of_queries else queries
        return statuses(torch.maximum(tiles.k1, queries) < self.num, torch.maximum(tiles.k0, starts) >= self.num)


@dataclass(frozen=True)
class Function(Pattern):
    """A user's function of (head, query, key)."""

    function: Callable[[Tensor, Tensor, Tensor], Tensor]

    def facts(self) -> Reads:
        """What the function reads."""
        return read_outside(self.function)

    def allowed(self, head: Tensor, query: Tensor, key: Tensor, sizes: Sizes) -> Tensor:
        """What the function says."""
        found = self.function(head, query, key)
        if not isinstance(found, Tensor) or found.dtype != torch.bool:
            said = f"{found.dtype}" if isinstance(found, Tensor) else repr(found)
            raise TypeError(f"sparse: a pattern's function must return a tensor of booleans, got {said}.")
        if type(found) is not type(query):
            raise ValueError(OF_STEP)
        asked = torch.broadcast_shapes(head.shape, query.shape, key.shape)
        if not _broadcasts(found.shape, asked):
            raise ValueError(
                "sparse: a pattern's function must return booleans that broadcast with its arguments; for head, query "
                f"and key of shapes {list(head.shape)}, {list(query.shape)} and {list(key.shape)} it returned "
                f"{list(found.shape)}."
            )
        return found


def _broadcasts(shape: torch.Size, to: torch.Size) -> bool:
    """Return whether a tensor of this shape expands to another one."""
    return len(shape) <= len(to) and all(a in (1, b) for a, b in zip(shape[::-1], to[::-1], strict=False))


everything = Everything()
causal = Causal()


@checked()
def pattern(function: Callable[..., Tensor]) -> Pattern:
    """Return a function as a pattern, for `&` and `|`.

    `function(head, query, key)`: returns booleans from int64 tensors that broadcast against each other, and depends on
    nothing else. For each shape of attention it is evaluated once, in several calls with the positions of some tiles
    each.

    >>> even = pattern(lambda head, query, key: key % 2 == 0) & causal
    """
    return Function(function)


@checked()
def sliding_window(window: int) -> Pattern:
    """Query i attends to keys j with |i - j| < window. Raises `ValueError` for a window below 1.

    >>> recent = sliding_window(1024) & causal  # the last 1,024 tokens, its own among them
    """
    return Window(_positive("sliding_window", "window", window))


@checked()
def sinks(num: int) -> Pattern:
    """All queries attend to the first `num` keys (attention sinks, arXiv:2309.17453), even to keys after the query: for
    a decoder, write `sinks(4) & causal`, or `is_causal=True`. Raises `ValueError` for `num` below 1.

    >>> streaming = (sinks(4) | sliding_window(1024)) & causal
    """
    return First(_positive("sinks", "num", num), of_queries=False)


@checked()
def prefix(num: int) -> Pattern:
    """The first `num` tokens attend to each other. Raises `ValueError` for `num` below 1.

    >>> prefix_lm = prefix(128) | causal
    """
    return First(_positive("prefix", "num", num), of_queries=True)


def _positive(where: str, name: str, value: int) -> int:
    if value < 1:
        raise ValueError(f"sparse.{where}: {name} must be 1 or more, got {value}.")
    return value
