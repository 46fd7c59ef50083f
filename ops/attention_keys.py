"""What attention of blocks looks at, and which of its weights are dropped."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Keys(NamedTuple):
    """Which keys a block of `block_q` queries looks at: all that the parts which are given allow.

    `starts` int32 [heads or 1, blocks + 1], `runs` int32 [..., 3]: runs of a block, each its first key, how many, and a
    row of `bits`, or -1 where all of its queries look at all of these keys. `bits` int64 [..., 64]: for each key of a
    run a bit for each query of the block. `chosen` int64 [batch, heads, blocks, ...]: numbers of blocks of `block_k`
    keys, in place of `starts`; -1 is none. `spans` int32 [batch or 1, queries, 2]: of each query the first key and the
    one behind the last; a negative number is an error. `there` bool [batch or 1, keys]: False for a key that nobody
    looks at. `causal`: none behind the query.
    """

    starts: Tensor | None
    runs: Tensor | None
    bits: Tensor | None
    chosen: Tensor | None
    spans: Tensor | None
    there: Tensor | None
    block_q: int
    block_k: int
    causal: bool


class Dropped(NamedTuple):
    """Weights that are dropped: those whose hash of 32 bits, of `seed`, is below `below`; others grow by `factor`."""

    seed: int
    below: int
    factor: float

    @classmethod
    def make(cls, seed: Tensor | None, part: float) -> Dropped:
        """`part`: of the weights."""
        if seed is None or not part:
            return cls(0, 0, 1.0)
        below = min(max(round(part * 2**32), 1), 2**32 - 1)
        return cls(int(seed), below, 1 / (1 - part))
